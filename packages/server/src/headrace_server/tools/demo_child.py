"""A demo tool as an MCP server: ``python -m headrace_server.tools.demo_child browser|python``.

A program for :mod:`headrace_server.tools.demo`. It wraps a tool of the ``gpt-oss`` package, whose
calls may block, in the main thread, where a signal can break them off: what they hold (a container)
is then given back by their own ``finally``. A thread beside it speaks the protocol. When the input
ends, or on SIGTERM, the call that runs is broken off. All this is done in a fork, so that whatever
it dies of, there is somebody to kill what it had started.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import queue
import resource
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import FrameType
from typing import Any, Never, TextIO

import anyio

from headrace_server.tools.base import MAX_OUTPUT, shorten

MAX_BYTES = 2 * 1024**3
"""Bytes of data of this process, and of each that it starts: a tool's output is held whole."""
GRACE_SECONDS = 10.0
"""For a call to give back what it holds."""
_NOTE = 100
"""Characters left for the note of :func:`shorten`: the parent cuts at the same length."""


@dataclass(frozen=True, slots=True)
class ToolJob:
    """A call that waits for the main thread."""

    tool: str
    arguments: Mapping[str, Any]
    answer: Future[str]


ToolJobs = queue.SimpleQueue[ToolJob]


def main(kind: str) -> None:
    """Serve a tool until the input ends, then kill the process group."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to the group: the fork ends at it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if fork := os.fork():
        os.close(0)
        os.close(1)
        os.waitpid(fork, 0)
        _kill_all()
    serve(kind)


def serve(kind: str) -> None:
    """Serve a tool until the input ends."""
    wire = _take_wire()
    _limit_memory()
    signal.signal(signal.SIGTERM, _leave)
    tool: Any = None
    try:
        problem = ""
        try:
            tool = BUILDERS[kind]()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        jobs: ToolJobs = queue.SimpleQueue()
        served = (_served(kind, tool, problem, jobs), *wire)
        threading.Thread(target=_speak, args=served, daemon=True).start()
        runner = asyncio.Runner()  # not closed: that may wait for threads
        while True:
            _work(runner, kind, tool, jobs.get())
    finally:
        with contextlib.suppress(Exception):
            tool.close()
        _kill_all()


def _take_wire() -> tuple[TextIO, TextIO]:
    """Keep the protocol's input and output apart from the standard ones, which anybody may use."""
    wire = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    os.dup2(2, 1)
    return wire


def _limit_memory() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = MAX_BYTES if most == resource.RLIM_INFINITY else min(most, MAX_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _leave(number: int, frame: FrameType | None) -> Never:
    """Break off what runs, once: the second signal must not break off the cleaning up."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _kill_all() -> None:
    """End, with all of the process group: what a call started may outlive it."""
    if os.getsid(0) == os.getpgrp():  # the parent starts it so
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _browser() -> Any:
    """The package's own choice of a search service."""
    package = importlib.import_module("gpt_oss.tools.simple_browser")
    name = "YouComBackend" if os.environ.get("BROWSER_BACKEND") == "youcom" else "ExaBackend"
    return package.SimpleBrowserTool(backend=getattr(package, name)(source="web"))


def _python() -> Any:
    return importlib.import_module("gpt_oss.tools.python_docker.docker_tool").PythonTool()


BUILDERS: Mapping[str, Callable[[], Any]] = {"browser": _browser, "python": _python}


def _work(runner: asyncio.Runner, kind: str, tool: Any, job: ToolJob) -> None:
    """One call, in the main thread."""
    if not job.answer.set_running_or_notify_cancel():
        return
    try:
        job.answer.set_result(runner.run(_answer(kind, tool, job)))
    except Exception as error:
        job.answer.set_exception(error)


async def _answer(kind: str, tool: Any, job: ToolJob) -> str:
    """The texts of the messages that a tool answers a call with."""
    harmony = importlib.import_module("openai_harmony")
    if kind == "python":
        recipient, text = kind, str(job.arguments.get("code", ""))
    else:
        recipient, text = f"{kind}.{job.tool}", json.dumps(job.arguments)
    message = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text)
    message = message.with_recipient(recipient).with_channel("analysis")
    parts = []
    async for answer in tool.process(message):
        parts += [content.text for content in answer.content if hasattr(content, "text")]
    return shorten("\n".join(parts), MAX_OUTPUT - _NOTE)


def _served(kind: str, tool: Any, problem: str, jobs: ToolJobs) -> Any:
    """The MCP server. Without a tool it offers none, and its instructions say why."""
    from mcp.server.lowlevel import Server
    from mcp_types import ListToolsResult

    described = [] if tool is None else _described(kind, tool)

    async def on_list(context: Any, params: Any) -> Any:
        return ListToolsResult(tools=described)

    async def on_call(context: Any, params: Any) -> Any:
        if params.name not in {one.name for one in described}:
            return _result(f"error: {kind} has no tool of that name", failed=True)
        job = ToolJob(params.name, params.arguments or {}, Future())
        jobs.put(job)
        try:
            return _result(await asyncio.wrap_future(job.answer))
        except Exception as error:
            # The text is for the parent's check of the tool; a model is shown the type.
            cause = f"{type(error).__name__}: {error}"
            said = f"error: the {kind} tool failed ({type(error).__name__})"
            return _result(said, failed=True, cause=cause[-1000:])

    instructions = problem if tool is None else tool.tool_config.description
    return Server(kind, instructions=instructions, on_list_tools=on_list, on_call_tool=on_call)


def _described(kind: str, tool: Any) -> list[Any]:
    """The tools as their package describes them; python takes code, and is described by none."""
    from mcp_types import Tool

    if kind == "python":
        schema = {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
        }
        return [Tool(name=kind, description=tool.tool_config.description, input_schema=schema)]
    return [
        Tool(name=one.name, description=one.description, input_schema=one.parameters or {})
        for one in tool.tool_config.tools
    ]


def _result(text: str, *, failed: bool = False, cause: str = "") -> Any:
    from mcp_types import CallToolResult, TextContent

    meta = {"cause": cause} if cause else None
    return CallToolResult(
        content=[TextContent(type="text", text=text)], is_error=failed, _meta=meta
    )


def _speak(server: Any, reading: TextIO, writing: TextIO) -> None:
    """The protocol's thread. At its end the main thread is told to leave."""
    try:
        asyncio.run(_serve(server, reading, writing))
    finally:
        _end_main()


def _end_main() -> None:
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    _kill_all()


async def _serve(server: Any, reading: TextIO, writing: TextIO) -> None:
    from mcp.server.stdio import stdio_server

    lines: Any = _lines(anyio.wrap_file(reading))
    async with stdio_server(lines, anyio.wrap_file(writing)) as streams:
        await server.run(*streams, server.create_initialization_options())


async def _lines(reading: anyio.AsyncFile[str]) -> AsyncIterator[str]:
    """Lines of the input; its end is the end of all, whatever still runs."""
    async for line in reading:
        yield line
    _end_main()


if __name__ == "__main__":
    main(sys.argv[1])
