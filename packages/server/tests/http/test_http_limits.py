"""Slow, large and many: what a connection may do before it is cut."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from typing import Any

import httpx2
import pytest

from headrace_testing.fakes.engine import FakeEngine

pytestmark = pytest.mark.req("SEC-20")
BODY = json.dumps({"prompt": "a"}).encode()
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
)


class Raw:
    """A connection by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, server: Any) -> Raw:
        return cls(*await asyncio.open_connection(*server.sock.getsockname()[:2]))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        try:
            return await asyncio.wait_for(self.reader.read(), 60)
        except ConnectionError:
            return b""
        finally:
            self.writer.close()


async def test_heads_that_do_not_come(
    live: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_HTTP_TIMEOUT_KEEP_ALIVE", "1")
    server = await live(FakeEngine("x"), header_timeout=0.3)
    again = await Raw.to(server)  # what it says at once is in time
    await again.send(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\nGET /version HT")
    silent, partial = [await Raw.to(server) for _ in range(2)]
    await partial.send(b"GET /version HTTP/1.1\r\nHost:")
    assert await silent.rest() == b""
    assert (await partial.rest()).startswith(b"HTTP/1.1 408 ")
    answers = await again.rest()
    assert answers.startswith(b"HTTP/1.1 200 ")
    # What came of the next request waits for the rest as long as an idle connection may.
    assert answers.count(b"HTTP/1.1 ") == 1
    # One byte after the other does not help.
    slow = await Raw.to(server)
    cut = asyncio.create_task(slow.rest())
    sent = 0
    with contextlib.suppress(ConnectionError):
        for byte in b"GET /version HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100:
            await slow.send(bytes([byte]))
            sent += 1
            if (await asyncio.wait([cut], timeout=0.05))[0]:
                break
    assert sent < 50
    await cut
    await until(lambda: server.state.connections.num_open == 0)


async def test_a_timely_head_is_not_cut_later(live: Any) -> None:
    server = await live(FakeEngine("x" * 30, delay=0.05), header_timeout=1.0)
    async with httpx2.AsyncClient() as client:
        answer = await client.post(
            server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 30, "stream": True}
        )
    assert answer.text.count("data: ") > 20


@pytest.mark.parametrize(
    "settings", [{"body_timeout": 0.4}, {"min_body_rate": 1 << 20}], ids=["time", "rate"]
)
async def test_bodies_that_do_not_come(live: Any, settings: Any) -> None:
    server = await live(FakeEngine("x"), **settings)
    raw = await Raw.to(server)
    await raw.send(HEAD + BODY[:3])
    answer = await asyncio.wait_for(raw.reader.readuntil(b"}}"), 60)
    assert answer.startswith(b"HTTP/1.1 408 ")
    raw.writer.close()
    async with httpx2.AsyncClient() as client:
        assert (await client.get(server.url + "/health")).status_code == 200


async def test_a_long_answer_is_no_slow_body(live: Any) -> None:
    server = await live(FakeEngine("x" * 20, delay=0.05), body_timeout=0.3, min_body_rate=1 << 20)
    async with httpx2.AsyncClient() as client:
        answer = await client.post(server.url + "/v1/completions", json={"prompt": "a"})
    assert answer.json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "gzip, identity", "GZIP"])
async def test_compressed_bodies_are_refused(connect: Any, coding: str) -> None:
    headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
    answer = await connect().post("/v1/completions", content=gzip.compress(BODY), headers=headers)
    assert answer.status_code == 415
    headers["Content-Encoding"] = "identity"
    answer = await connect().post("/v1/completions", content=BODY, headers=headers)
    assert answer.status_code == 200


async def test_too_many_connections(live: Any, until: Any) -> None:
    server = await live(FakeEngine("x"), max_connections=3)
    connections = server.state.connections
    await until(lambda: connections.num_open == 0)
    held = [await Raw.to(server) for _ in range(3)]
    await until(lambda: connections.num_open == 3)
    refused = await Raw.to(server)
    answer = await refused.rest()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 503
    await held[0].send(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert (await held[0].rest()).startswith(b"HTTP/1.1 200 ")
    for raw in held[1:]:
        raw.writer.close()
    await until(lambda: connections.num_open == 0)
    assert not connections.by_peer


async def test_too_many_connections_of_one_peer(live: Any, until: Any) -> None:
    server = await live(FakeEngine("x"), max_connections_per_peer=2)
    await until(lambda: server.state.connections.num_open == 0)
    held = [await Raw.to(server) for _ in range(2)]
    await until(lambda: server.state.connections.num_open == 2)
    assert await (await Raw.to(server)).rest() == b""
    await held[0].send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await held[0].reader.readline()).startswith(b"HTTP/1.1 200 ")
    for raw in held:
        raw.writer.close()
    await until(lambda: not server.state.connections.by_peer)


async def test_hardened_limits(live: Any) -> None:
    server = await live(FakeEngine("x"), hardened=True)
    async with httpx2.AsyncClient() as client:
        headers = {f"x-{i}": "y" for i in range(110)}
        assert (await client.get(server.url + "/v1/models", headers=headers)).status_code == 431
        body = json.dumps({"prompt": "a" * (17 << 20)}).encode()
        answer = await client.post(
            server.url + "/v1/completions", content=body,
            headers={"Content-Type": "application/json"},
        )  # fmt: skip
        assert answer.status_code == 413
    raw = await Raw.to(server)
    await raw.send(b"GET /version HTTP/1.1\r\nHost: x\r\nX: " + b"y" * (70 << 10))
    assert (await raw.rest()).startswith(b"HTTP/1.1 400 ")
