"""Tool servers: addresses, MCP over loopback, what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace_core.errors import ConfigError, MissingDependency
from headrace_server import ServerSettings, create_app
from headrace_server.tools import base, mcp
from headrace_server.tools.address import Address, parse_addresses
from headrace_server.tools.base import MAX_OUTPUT, Namespace, Sessions, Tool, ToolServerUnreachable
from headrace_server.tools.load import load_tool_server
from headrace_server.tools.mcp import McpToolServer, address_source
from headrace_testing.fakes.engine import FakeEngine
from headrace_testing.waiting import until

WRITE = '<tool_call>{"name": "echo", "arguments": {"text": "hi"}}</tool_call>'


def test_addresses() -> None:
    assert parse_addresses("127.0.0.1:1, [::1]:2,tools.example:3,localhost:4") == (
        Address("127.0.0.1", 1), Address("::1", 2), Address("tools.example", 3),
        Address("localhost", 4),
    )  # fmt: skip
    assert str(Address("::1", 2)) == "[::1]:2"


@pytest.mark.parametrize(
    "text",
    ["", "localhost", "localhost:", "localhost:0", "localhost:70000", "::1:80", "[127.0.0.1]:80",
     "1.2.3:80", "300.1.1.1:80", "http://a:80", "a b:80", "a:80/x", "user@a:80", "a:80,", "a:٣",
     "demo,a:80"],
)  # fmt: skip
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port") as caught:
        parse_addresses(text)
    assert caught.value.field == "tool_server"


def test_an_address_twice() -> None:
    with pytest.raises(ConfigError, match="twice"):
        parse_addresses("a:1,a:1")


@pytest.mark.req("SEC-24")
def test_nothing_by_default() -> None:
    assert load_tool_server(None) is None


def test_absent_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n in ("mcp", "gpt_oss") else find(n)
    )
    with pytest.raises(MissingDependency, match=r"pip install 'headrace-server\[tools\]'"):
        create_app(FakeEngine(), ServerSettings(tool_server="127.0.0.1:1"))
    with pytest.raises(MissingDependency, match=r"pip install 'gpt-oss>=0.0.7'"):
        create_app(FakeEngine(), ServerSettings(tool_server="demo"))


@pytest.fixture
def mcp_2() -> None:
    pytest.importorskip("mcp.server.mcpserver", reason="mcp is absent, or older than 2")


def test_a_package_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.30.0")
    with pytest.raises(MissingDependency, match=r"too old \(1.30.0\).*headrace-server\[tools\]"):
        mcp.require_mcp()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(params=["http", "sse"])
async def mcp_port(request: Any) -> AsyncIterator[int]:
    """A real MCP server on loopback, over each transport."""
    server_module = pytest.importorskip("mcp.server.mcpserver")
    import uvicorn

    tools = server_module.MCPServer("test-tools", instructions="For tests.")

    @tools.tool()
    def echo(text: str) -> str:
        """Repeats a text."""
        return f"echo {text}"

    @tools.tool()
    def fail() -> str:
        """Fails."""
        raise ValueError("on purpose")

    @tools.tool()
    def flood() -> str:
        """Says too much."""
        return "x" * (MAX_OUTPUT + 10)

    app = tools.streamable_http_app() if request.param == "http" else tools.sse_app()
    port = free_port()
    config = uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=1)
    running = uvicorn.Server(config)
    task = asyncio.create_task(running.serve())
    await until(lambda: running.started)
    yield port
    running.should_exit = True
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_real_mcp_server(mcp_port: int) -> None:
    server = McpToolServer([address_source(Address("127.0.0.1", mcp_port))])
    assert await server.has_tool("test-tools")
    assert not await server.has_tool("other")
    assert await server.describe("other") is None
    space = await server.describe("test-tools")
    assert space is not None
    assert [t.name for t in space.tools] == ["echo", "fail", "flood"]
    assert (space.description, space.tools[0].description) == ("For tests.", "Repeats a text.")
    assert list(space.tools[0].schema["properties"]) == ["text"]
    only = await server.describe("test-tools", ["echo"])
    assert only is not None
    assert [t.name for t in only.tools] == ["echo"]
    with pytest.raises(KeyError):
        async with server.session("other", "1"):
            pass
    opened = Sessions(server, "resp_1")
    try:
        assert await opened.call("test-tools", "echo", '{"text": "hi"}') == ("echo hi", False)
        assert (await opened.call("test-tools", "fail", "")).failed
        assert (await opened.call("test-tools", "nothing", "{}")).failed
        assert (await opened.call("test-tools", "echo", "{broken")).text.startswith("error: ")
        assert (await opened.call("other", "echo", "{}")).failed
        flood = await opened.call("test-tools", "flood", "{}")
        assert len(flood.text) < MAX_OUTPUT + 100
        assert flood.text.endswith(f"{MAX_OUTPUT} shown]")
    finally:
        await opened.close()


async def test_a_response_calls_it(mcp_port: int, connect: Any) -> None:
    replies = [WRITE, "Done."]
    client = connect(
        FakeEngine(lambda text, index: replies.pop(0)), tool_server=f"127.0.0.1:{mcp_port}",
        enable_auto_tool_choice=True, tool_call_parser="hermes",
    )  # fmt: skip
    tools = [{"type": "mcp", "server_label": "test-tools", "require_approval": "never"}]
    answer = await client.post("/v1/responses", json={"input": "Hi", "tools": tools})
    assert answer.status_code == 200, answer.text
    call, message = answer.json()["output"]
    assert (call["type"], call["status"], call["output"]) == ("mcp_call", "completed", "echo hi")
    assert message["content"][0]["text"] == "Done."


@pytest.mark.usefixtures("mcp_2")
async def test_a_server_that_does_not_answer(connect: Any) -> None:
    port = free_port()
    server = McpToolServer([address_source(Address("127.0.0.1", port))])
    with pytest.raises(ToolServerUnreachable):
        await server.namespaces()
    client = connect(FakeEngine(), tool_server=f"127.0.0.1:{port}")
    tools = [{"type": "mcp", "server_label": "x"}]
    answer = await client.post("/v1/responses", json={"input": "Hi", "tools": tools})
    assert answer.status_code == 424
    assert str(port) not in json.dumps(answer.json())


@pytest.mark.usefixtures("mcp_2")
@pytest.mark.req("REL-05")
async def test_a_dead_server_is_not_asked_by_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests take turns to ask; each would wait for the timeouts of all before it."""
    asked = []

    @contextlib.asynccontextmanager
    async def connect(address: Address, headers: Any) -> AsyncIterator[Any]:
        asked.append(address)
        raise OSError("refused")
        yield

    monkeypatch.setattr(mcp, "_over_http", connect)
    monkeypatch.setattr(mcp, "_over_sse", connect)
    server = McpToolServer([address_source(Address("127.0.0.1", 1))])
    results = await asyncio.gather(*(server.namespaces() for _ in range(5)), return_exceptions=True)
    assert all(isinstance(r, ToolServerUnreachable) for r in results)
    assert len(asked) == 2  # once, over both transports
    monkeypatch.setattr(mcp, "RETRY_SECONDS", 0.0)
    with pytest.raises(ToolServerUnreachable):
        await server.namespaces()
    assert len(asked) == 4


async def test_python_takes_bare_code() -> None:
    class Dead(base.ToolServer):
        async def namespaces(self) -> dict[str, Namespace]:
            return {"a": Namespace("a", None, (Tool("b"),))}

        @contextlib.asynccontextmanager
        async def session(self, *args: Any) -> AsyncIterator[Any]:
            raise ToolServerUnreachable("somewhere:1")
            yield

    sessions = Sessions(Dead(), "1")
    result = await sessions.call("a", "b", "{}")
    assert result == ("error: the tool server does not answer", True)
    await sessions.close()
    assert base.parse_arguments("python", "print(1)") == {"code": "print(1)"}
    assert base.parse_arguments("python", "[1]") == {"code": "[1]"}
