"""Clients that read little: each byte that they take puts their time limit off."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from headrace_server.streaming import event_stream as stream
from headrace_testing.fakes.engine import FakeEngine, fake_served_model

MANY = 900_000


class HeldClock:
    """The running loop's clock, which can be moved on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self.ahead, time = 0.0, loop.time
        monkeypatch.setattr(loop, "time", lambda: time() + self.ahead)

    async def move(self, seconds: float) -> None:
        """Move it, and let everybody notice."""
        self.ahead += seconds
        for _ in range(20):
            await asyncio.sleep(0)


async def ask(server: Any) -> socket.socket:
    """A connection of few bytes that has asked for a long stream."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, server.sock.getsockname())
    body = json.dumps({"prompt": "a", "max_tokens": MANY, "stream": True}).encode()
    await loop.sock_sendall(
        client,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body,
    )
    return client


class Counting(FakeEngine):
    """Counts the outputs that were taken."""

    taken = 0

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        async for output in super().generate(*args, **kwargs):
            self.taken += 1
            yield output


@pytest.mark.req("REL-06")
async def test_a_client_that_reads_100_bytes_a_second_stays(
    live: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fake_served_model(max_model_len=10**6)
    engine = Counting("x" * MANY, model=model, tokens_per_output=20)
    server = await live(engine)
    client, seen = await ask(server), -1

    def is_full() -> bool:
        nonlocal seen
        seen, before = engine.taken, seen
        return 0 < seen == before

    await until(is_full)
    clock = HeldClock(monkeypatch)
    try:
        # Sixteen minutes, of which each read is a third of what the socket holds.
        for _ in range(100):
            await clock.move(10)
            await asyncio.get_running_loop().sock_recv(client, 1000)
            assert not engine.aborted
        waited = 0
        while not engine.aborted:
            await clock.move(1)
            waited += 1
            assert waited < 2 * stream.WRITE_TIMEOUT, "it reads nothing and is not cut off"
        assert waited >= stream.WRITE_TIMEOUT - 30
    finally:
        client.close()
