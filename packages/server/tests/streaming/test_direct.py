"""Pieces of a stream that go straight to the socket: on the wire they are what ASGI would have sent."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from typing import Any

import httpx2
import pytest

from headrace_server.http.h11_protocol import Protocol
from headrace_server.protocols.openai.bodies.completions import (
    CompletionChunk,
    CompletionChunkChoice,
)
from headrace_server.streaming.event_stream import EventTemplate, event
from headrace_testing.fakes.engine import FakeEngine

TEXT = 'a "quoted" \\ word,\nüber 日本 \U0001f600 \x00'


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was written directly."""
    pieces: list[bytes] = []
    write = Protocol._write_chunk

    def recorded(self: Protocol, cycle: Any, data: bytes) -> bool:
        done = write(self, cycle, data)
        if done:
            pieces.append(data)
        return done

    monkeypatch.setattr(Protocol, "_write_chunk", recorded)
    return pieces


class Foreign:
    """Middleware of an operator's own: it counts what it sees."""

    seen = 0

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def count(message: Any) -> None:
            Foreign.seen += bool(message.get("body"))
            await send(message)

        await self._app(scope, receive, count)


async def stream_of(server: Any, **body: Any) -> httpx2.Response:
    async with httpx2.AsyncClient() as client:
        url = server.url + "/v1/completions"
        return await client.post(url, json={"prompt": "a", "stream": True, **body})


@pytest.mark.parametrize("pushes", [True, False])
async def test_the_stream_is_whole_and_counted(
    live: Any, written: list[bytes], events: Any, pushes: bool
) -> None:
    server = await live(FakeEngine(TEXT, delay=0.001, pushes=pushes))
    answer = await stream_of(server, max_tokens=1000)
    assert "".join(e["choices"][0]["text"] for e in events(answer.text)) == TEXT
    assert len(written) > 5
    async with httpx2.AsyncClient() as client:
        metrics = (await client.get(server.url + "/metrics")).text
    (line,) = [
        line
        for line in metrics.splitlines()
        if line.startswith("headrace:http_response_size_bytes_sum{") and "completions" in line
    ]
    assert float(line.rpartition(" ")[2]) == len(answer.content)


async def test_other_middleware_sees_every_piece(live: Any, written: list[bytes]) -> None:
    Foreign.seen = 0
    path = f"{Foreign.__module__}.Foreign"
    server = await live(FakeEngine("abcdef", delay=0.001), middleware=[path])
    await stream_of(server)
    assert not written
    assert Foreign.seen >= 6


async def test_a_client_of_http_1_0_gets_no_chunks(live: Any, written: list[bytes]) -> None:
    server = await live(FakeEngine("abc", delay=0.001))
    reader, writer = await asyncio.open_connection(*server.sock.getsockname())
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    assert not written
    assert answer.partition(b"\r\n\r\n")[2].startswith(b"data: {")


@pytest.mark.parametrize("pushes", [True, False])
async def test_an_answer_that_is_whole_at_once(live: Any, events: Any, pushes: bool) -> None:
    server = await live(FakeEngine("abc", tokens_per_output=100, pushes=pushes))
    async with asyncio.timeout(60):
        answer = await stream_of(server, max_tokens=100)
    assert "".join(e["choices"][0]["text"] for e in events(answer.text)) == "abc"


async def test_a_stretch_that_the_socket_refuses_comes_whole(
    live: Any, events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, asked = Protocol._write_chunk, iter(range(10**6))

    def stubborn(self: Protocol, cycle: Any, data: bytes) -> bool:
        return next(asked) % 3 == 0 and write(self, cycle, data)

    monkeypatch.setattr(Protocol, "_write_chunk", stubborn)
    server = await live(FakeEngine(TEXT, delay=0.001))
    answer = await stream_of(server, max_tokens=1000, logprobs=1)
    assert "".join(e["choices"][0]["text"] for e in events(answer.text)) == TEXT


@pytest.mark.parametrize("text", [TEXT, "", "</script>\u2028"])
def test_a_template_gives_what_the_encoder_gives(text: str) -> None:
    def make(text: str) -> CompletionChunk:
        return CompletionChunk('i"d', 1, "mödel", [CompletionChunkChoice(3, text)], "fp")

    assert EventTemplate(make)(text) == event(make(text))


@pytest.mark.req("L3")
async def test_a_connection_that_has_ended_needs_no_garbage_collector(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[weakref.ref[Protocol]] = []
    connection_lost = Protocol.connection_lost

    def recorded(self: Protocol, exc: Exception | None) -> None:
        lost.append(weakref.ref(self))
        connection_lost(self, exc)

    monkeypatch.setattr(Protocol, "connection_lost", recorded)
    server = await live(FakeEngine(TEXT))
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            await stream_of(server, max_tokens=20)
        async with asyncio.timeout(20):
            while len(lost) < 3 or any(ref() is not None for ref in lost):
                await asyncio.sleep(0)
    finally:
        gc.enable()
