"""Tool servers that speak MCP (the Model Context Protocol).

Needs the ``mcp`` package. Only the addresses that the operator gave are connected to, over
streamable HTTP or SSE; redirects leave an address for no other (the package follows none to another
origin). :mod:`headrace_server.tools.demo` has servers that are processes of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace_core.errors import MissingDependency
from headrace_server.tools.address import Address
from headrace_server.tools.base import (
    Namespace,
    Tool,
    ToolResult,
    ToolServer,
    ToolServerUnreachable,
    ToolSession,
)

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
CALL_SECONDS = 120.0
RETRY_SECONDS = 5.0
"""Until a server that did not answer is asked for its tools again."""
OLDEST = 2
"""Version of the ``mcp`` package from which on it has what is used here."""
MAX_TOOLS = 256
"""Tools of one server that are offered."""

Connect = Callable[[Mapping[str, str]], AbstractAsyncContextManager[Any]]
"""Connects to a server, with headers; gives an initialized client of the ``mcp`` package."""


@dataclass(frozen=True, eq=False, slots=True)
class McpSource:
    """One MCP server: how it is reached, and how it is treated."""

    name: str
    """For the log."""
    transports: Sequence[Connect]
    """The first that the server speaks is used."""
    connect_seconds: float = CONNECT_SECONDS
    listing_seconds: float = CONNECT_SECONDS
    """For connecting and listing its tools, and for ``check``."""
    check: Callable[[Any], Awaitable[str]] | None = None
    """Given a client: why the tools are not to be offered; empty if they are."""
    own: bool = False
    """A process of this server's. It is asked for its tools once, at the start, and left out if it
    has none or fails ``check``; a call that fails ends the session, and with it the process."""


def address_source(address: Address) -> McpSource:
    """The server at an address; endpoints are ``/mcp`` (streamable HTTP), else ``/sse``."""
    return McpSource(str(address), (partial(_over_http, address), partial(_over_sse, address)))


class McpToolServer(ToolServer):
    """The MCP servers that the operator named.

    Raises:
        MissingDependency: the ``mcp`` package is absent.
    """

    def __init__(self, sources: Sequence[McpSource]) -> None:
        require_mcp()
        self._sources = tuple(sources)
        self._found: dict[str, Namespace] = {}
        self._where: dict[str, tuple[McpSource, Connect]] = {}
        self._left_out: set[McpSource] = set()
        self._listing = asyncio.Lock()
        self._failed: dict[McpSource, float] = {}
        """Servers that did not answer -> when, by the event loop's clock."""

    async def prepare(self) -> None:
        own = [source for source in self._sources if source.own]
        async with self._listing:
            await self._find_all(own)
        if own:
            logger.info("tools of this server's own: %s", ", ".join(self._found) or "none")

    async def namespaces(self) -> Mapping[str, Namespace]:
        """Asked for once; servers that did not answer are asked again after a while, so that
        requests do not queue up for their timeouts."""
        async with self._listing:
            await self._find_all(self._sources)
        return self._found

    async def describe(self, label: str, names: Collection[str] | None = None) -> Namespace | None:
        # A server that is known serves on while another does not answer.
        found = self._found.get(label)
        return await super().describe(label, names) if found is None else found.only(names)

    async def _find_all(self, sources: Sequence[McpSource]) -> None:
        settled = {source for source, _ in self._where.values()} | self._left_out
        for source in sources:
            if source not in settled:
                await self._find(source)

    async def _find(self, source: McpSource) -> None:
        """List a server's tools, over the first transport that it speaks."""
        clock = asyncio.get_running_loop().time
        if clock() - self._failed.get(source, -RETRY_SECONDS) < RETRY_SECONDS:
            raise ToolServerUnreachable(source.name)
        for connect in source.transports:
            try:
                if reason := await self._list(source, connect):
                    self._leave_out(source, reason)
                return
            except Exception as error:
                logger.warning("tool server %s: %s", source.name, _said(error))
        if source.own:
            self._leave_out(source, "it did not start, or not in time")
            return
        self._failed[source] = clock()
        raise ToolServerUnreachable(source.name)

    async def _list(self, source: McpSource, connect: Connect) -> str:
        """Take up a server's tools; why they are not to be offered, if so."""
        async with asyncio.timeout(source.listing_seconds), connect({}) as client:
            listed = (await client.list_tools()).tools
            if source.own and not listed:
                return client.instructions or "it offers no tools"
            if source.check is not None and (reason := await source.check(client)):
                return reason
            self._add(source, connect, client, listed)
        return ""

    def _leave_out(self, source: McpSource, reason: str) -> None:
        self._left_out.add(source)
        logger.warning("tool server %s is left out: %s", source.name, reason)

    def _add(self, source: McpSource, connect: Connect, client: Any, listed: Sequence[Any]) -> None:
        info = client.server_info
        label = info.name if info is not None and info.name else source.name
        if label in self._found:
            logger.warning("two tool servers are called %r; one is %r now", label, source.name)
            label = source.name
        tools = tuple(_tool(t) for t in listed[:MAX_TOOLS])
        self._found[label] = Namespace(label, client.instructions, tools)
        self._where[label] = (source, connect)
        names = ", ".join(t.name for t in tools)
        logger.info("tool server %s is %r: %s", source.name, label, names)

    @asynccontextmanager
    async def session(
        self, label: str, session_id: str, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[ToolSession]:
        source, connect = self._where[label]
        sent = {**(headers or {}), "x-session-id": session_id}
        try:
            async with asyncio.timeout(source.connect_seconds) as limit, connect(sent) as client:
                limit.reschedule(None)
                yield _McpSession(client, own=source.own)
        except Exception as error:
            logger.warning("tool server %s: %s", source.name, _said(error))
            raise ToolServerUnreachable(source.name) from error


def require_mcp() -> None:
    """Raises: MissingDependency: the ``mcp`` package is absent, or older than 2."""
    found = None
    if importlib.util.find_spec("mcp") is not None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version("mcp")
        if found is None or int(found.split(".")[0]) >= OLDEST:
            return
    raise MissingDependency(
        "mcp", needed_for="--tool-server", install="pip install 'headrace-server[tools]'",
        found=found,
    )  # fmt: skip


class _McpSession(ToolSession):
    def __init__(self, client: Any, *, own: bool) -> None:
        self._client, self._own = client, own

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                result = await self._client.call_tool(tool, dict(arguments))
        except TimeoutError:
            self.ended = self._own
            return ToolResult(f"error: the tool took longer than {CALL_SECONDS:.0f} s", failed=True)
        except Exception as error:
            # Its text may hold addresses; the log has it.
            self.ended = self._own
            logger.warning("tool %r failed: %s", tool, _said(error))
            return ToolResult("error: the tool could not be called", failed=True)
        text = "\n".join(_text(block) for block in result.content)
        return ToolResult(text, failed=bool(result.is_error))


def _said(error: BaseException) -> str:
    """An exception for the log; of a group, its first member."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _text(block: Any) -> str:
    text = getattr(block, "text", None)
    return text if isinstance(text, str) else f"[{getattr(block, 'type', 'unknown')} left out]"


def _tool(listed: Any) -> Tool:
    return Tool(listed.name, listed.description or "", listed.input_schema or {})


@asynccontextmanager
async def _over_http(address: Address, headers: Mapping[str, str]) -> AsyncIterator[Any]:
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    async with _http_client(dict(headers)) as http:
        transport = streamable_http_client(f"http://{address}/mcp", http_client=http)
        async with Client(transport, cache=None) as client:
            yield client


@asynccontextmanager
async def _over_sse(address: Address, headers: Mapping[str, str]) -> AsyncIterator[Any]:
    from mcp import Client
    from mcp.client.sse import sse_client

    transport = sse_client(
        f"http://{address}/sse", headers=dict(headers), httpx_client_factory=_http_client
    )
    async with Client(transport, cache=None, mode="legacy") as client:
        yield client


def _http_client(
    headers: dict[str, str] | None = None, timeout: Any = None, auth: Any = None
) -> Any:
    """No proxies and no credentials from the environment."""
    import httpx2

    limits = timeout or httpx2.Timeout(CONNECT_SECONDS, read=CALL_SECONDS)
    return httpx2.AsyncClient(headers=headers, timeout=limits, auth=auth, trust_env=False)
