"""``--tool-server demo``: the browser and python tools of the ``gpt-oss`` package.

Each session of a tool is a child process (:mod:`headrace_server.tools.demo_child`) that speaks MCP
over its standard input and output. What it is given of this process is an environment of listed
variables, those pipes and nothing else. The browser asks a search service, which fetches the pages:
no address that a model wrote is connected to from here.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from headrace_core.errors import ConfigError, MissingDependency
from headrace_server.tools.mcp import CALL_SECONDS, McpSource, require_mcp

logger = logging.getLogger(__name__)

NEEDED = (0, 0, 7)
"""Version of the package."""
MAX_CHILDREN = 16
"""Child processes at once; the next waits up to :data:`START_SECONDS`, then its call fails."""
START_SECONDS = 30.0
"""For a child to start: it imports for one to three seconds, more on a busy machine."""
SEARCH_KEYS: Mapping[str, str] = {"exa": "EXA_API_KEY", "youcom": "YDC_API_KEY"}
"""Values of ``BROWSER_BACKEND`` -> the variable that holds the service's key."""
CONTAINER = "docker"
BACKENDS = (CONTAINER, "dangerously_use_uv", "dangerously_use_local_jupyter")
"""Values of ``PYTHON_EXECUTION_BACKEND``."""
LISTED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "SSL_CERT_FILE")
LISTED_FOR: Mapping[str, tuple[str, ...]] = {
    "browser": (
        "BROWSER_BACKEND", *SEARCH_KEYS.values(), "TIKTOKEN_CACHE_DIR", "TIKTOKEN_RS_CACHE_DIR",
    ),
    "python": (
        "DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "PYTHON_EXECUTION_BACKEND",
    ),
}  # fmt: skip
"""Variables that children get, of those that are set. The ``mcp`` package adds LOGNAME, SHELL, TERM
and USER."""
_HELP = (
    "it needs a Docker daemon that this user may use (DOCKER_HOST), and the image python:3.11 "
    "(docker pull python:3.11)"
)


def check_demo(environ: Mapping[str, str] = os.environ, *, hardened: bool = False) -> None:
    """True if the demo tools can be started here, without starting them.

    Args:
        hardened: refuse to run code outside a container.

    Raises:
        MissingDependency: a package is absent or too old.
        ConfigError: a variable of the packages' has a value that they do not know, or that is
            refused.
    """
    found = _version()
    if found is None or _numbers(found) < NEEDED:
        install = "pip install 'gpt-oss>=0.0.7'"
        if sys.version_info < (3, 12):
            running = ".".join(map(str, sys.version_info[:3]))
            install += f" (which needs Python 3.12 or newer; this is {running})"
        raise MissingDependency(
            "gpt_oss", needed_for="--tool-server demo", install=install, found=found
        )
    require_mcp()
    _choice(environ, "PYTHON_EXECUTION_BACKEND", (CONTAINER,) if hardened else BACKENDS)
    _choice(environ, "BROWSER_BACKEND", tuple(SEARCH_KEYS))


def demo_sources(environ: Mapping[str, str] = os.environ) -> list[McpSource]:
    """The tools that may be offered; the rest is left out with a warning.

    Raises: as :func:`check_demo`.
    """
    check_demo(environ)
    slots = asyncio.Semaphore(MAX_CHILDREN)
    sources = []
    key = SEARCH_KEYS[_choice(environ, "BROWSER_BACKEND", tuple(SEARCH_KEYS))]
    if environ.get(key):
        sources.append(_source("browser", environ, slots))
    else:
        logger.warning(
            "tool server demo browser is left out: set %s, the search service's key; services, "
            "by BROWSER_BACKEND: %s", key, ", ".join(SEARCH_KEYS),
        )  # fmt: skip
    backend = _choice(environ, "PYTHON_EXECUTION_BACKEND", BACKENDS)
    if backend != CONTAINER:
        logger.warning(
            "PYTHON_EXECUTION_BACKEND=%s: code that a model wrote runs on this machine with this "
            "user's rights, in a child process but outside a container", backend,
        )  # fmt: skip
    sources.append(_source("python", environ, slots, partial(_runs_code, backend)))
    return sources


def _source(
    kind: str, environ: Mapping[str, str], slots: asyncio.Semaphore, check: Any = None
) -> McpSource:
    start = partial(_child, kind, child_environment(kind, environ), slots)
    return McpSource(
        f"demo {kind}",
        (start,),
        connect_seconds=START_SECONDS,
        listing_seconds=START_SECONDS + (CALL_SECONDS if check else 0),
        check=check,
        own=True,
    )


def child_environment(kind: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a child gets."""
    return {name: environ[name] for name in LISTED + LISTED_FOR[kind] if name in environ}


@asynccontextmanager
async def _child(
    kind: str, environment: Mapping[str, str], slots: asyncio.Semaphore, headers: Mapping[str, str]
) -> AsyncIterator[Any]:
    """A client of a new child. Leaving ends the child and what it started."""
    from mcp import Client, StdioServerParameters, stdio_client

    if slots.locked():
        logger.warning("%d processes of demo tools run; a session waits for one to end",
                       MAX_CHILDREN)  # fmt: skip
    # -P: nothing is imported from the working directory.
    words = ["-P", "-m", "headrace_server.tools.demo_child", kind]
    parameters = StdioServerParameters(command=sys.executable, args=words, env=dict(environment))
    async with slots:
        # What the package logs holds queries and code of requests.
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            async with Client(stdio_client(parameters, errlog=nowhere), cache=None) as client:
                yield client


async def _runs_code(backend: str, client: Any) -> str:
    """Why the python tool is not to be offered: it must really run code."""
    help_ = _HELP if backend == CONTAINER else "see PYTHON_EXECUTION_BACKEND"
    try:
        async with asyncio.timeout(CALL_SECONDS):
            result = await client.call_tool("python", {"code": "print(6 * 7)"})
    except TimeoutError:
        return f"print(6 * 7) took longer than {CALL_SECONDS:.0f} s; {help_}"
    said = "".join(getattr(block, "text", "") for block in result.content)
    if not result.is_error and said.strip() == "42":
        return ""
    cause = (result.meta or {}).get("cause") or said
    return f"print(6 * 7) did not answer 42 but {cause[-500:]!r}; {help_}"


def _choice(environ: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    """A variable's value; the first that is known, if it is unset."""
    value = environ.get(name) or known[0]
    if value not in known:
        raise ConfigError(
            f"tool_server = 'demo': the environment's {name} = {value!r} must be one of "
            + ", ".join(known),
            field="tool_server",
        )
    return value


def _version() -> str | None:
    """Version of the installed package; None: it is not installed."""
    if importlib.util.find_spec("gpt_oss") is None:
        return None
    try:
        return importlib.metadata.version("gpt-oss")
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:3])
