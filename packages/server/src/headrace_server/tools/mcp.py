"""Tool servers that speak MCP (the Model Context Protocol), over streamable HTTP or SSE.

Needs the ``mcp`` package. Only the addresses that the operator gave are connected to; redirects
leave an address for no other (the package follows none to another origin).
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
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
MAX_TOOLS = 256
"""Tools of one server that are offered."""

Connect = Callable[[Address, Mapping[str, str]], AbstractAsyncContextManager[Any]]
"""Connects to a server, with headers; gives an initialized client of the ``mcp`` package."""


class McpToolServer(ToolServer):
    """The MCP servers that the operator named.

    Args:
        addresses: where they listen; endpoints are ``/mcp`` (streamable HTTP), else ``/sse``.

    Raises:
        MissingDependency: the ``mcp`` package is absent.
    """

    def __init__(self, addresses: Sequence[Address]) -> None:
        if importlib.util.find_spec("mcp") is None:
            raise MissingDependency(
                "mcp", needed_for="--tool-server", install="pip install 'headrace-server[tools]'"
            )
        self._addresses = tuple(addresses)
        self._found: dict[str, Namespace] = {}
        self._where: dict[str, tuple[Address, Connect]] = {}
        self._listing = asyncio.Lock()
        self._failed: dict[Address, float] = {}
        """Servers that did not answer -> when, by the event loop's clock."""

    async def namespaces(self) -> Mapping[str, Namespace]:
        """Asked for once; servers that did not answer are asked again after a while, so that
        requests do not queue up for their timeouts."""
        async with self._listing:
            known = {address for address, _ in self._where.values()}
            for address in self._addresses:
                if address not in known:
                    await self._find(address)
        return self._found

    async def describe(self, label: str, names: Collection[str] | None = None) -> Namespace | None:
        # A server that is known serves on while another does not answer.
        found = self._found.get(label)
        return await super().describe(label, names) if found is None else found.only(names)

    async def _find(self, address: Address) -> None:
        """List a server's tools, over the first transport that it speaks."""
        clock = asyncio.get_running_loop().time
        if clock() - self._failed.get(address, -RETRY_SECONDS) < RETRY_SECONDS:
            raise ToolServerUnreachable(str(address))
        for connect in (_over_http, _over_sse):
            try:
                async with asyncio.timeout(CONNECT_SECONDS), connect(address, {}) as client:
                    self._add(address, connect, client, (await client.list_tools()).tools)
                return
            except Exception as error:
                logger.warning("tool server %s: %s", address, _said(error))
        self._failed[address] = clock()
        raise ToolServerUnreachable(str(address))

    def _add(self, address: Address, connect: Connect, client: Any, listed: Sequence[Any]) -> None:
        info = client.server_info
        label = info.name if info is not None and info.name else str(address)
        if label in self._found:
            logger.warning("two tool servers are called %r; one is %r now", label, str(address))
            label = str(address)
        tools = tuple(_tool(t) for t in listed[:MAX_TOOLS])
        self._found[label] = Namespace(label, client.instructions, tools)
        self._where[label] = (address, connect)
        logger.info("tool server %s is %r: %s", address, label, ", ".join(t.name for t in tools))

    @asynccontextmanager
    async def session(
        self, label: str, session_id: str, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[ToolSession]:
        address, connect = self._where[label]
        sent = {**(headers or {}), "x-session-id": session_id}
        try:
            async with asyncio.timeout(CONNECT_SECONDS) as limit, connect(address, sent) as client:
                limit.reschedule(None)
                yield _McpSession(client)
        except Exception as error:
            logger.warning("tool server %s: %s", address, _said(error))
            raise ToolServerUnreachable(str(address)) from error


class _McpSession(ToolSession):
    def __init__(self, client: Any) -> None:
        self._client = client

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                result = await self._client.call_tool(tool, dict(arguments))
        except TimeoutError:
            return ToolResult(f"error: the tool took longer than {CALL_SECONDS:.0f} s", failed=True)
        except Exception as error:
            # Its text may hold addresses; the log has it.
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
