"""What HTTP clients cost on a stream of events; needs aiohttp and httpx beside headrace.

A server in another process sends events to many connections at once, as an engine does; printed is the
processor time that each client took for an event. The reason for ADR 0012.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from headrace.bench.http import Client, events

CONNECTIONS, EVENTS, GAP, ROUNDS = 32, 128, 0.01, 5
BODY = json.dumps({"prompt": list(range(256)), "stream": True}).encode()
CHOICE = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None}
EVENT = b"data: %b\n\n" % json.dumps({"id": "cmpl-1", "model": "m", "choices": [CHOICE]}).encode()


async def raw(url: str) -> None:
    """headrace's own: pieces are kept, events are cut afterwards."""
    client = Client(url)
    answers = await asyncio.gather(*(client.post("/", BODY) for _ in range(CONNECTIONS)))
    counts = [sum(bool(json.loads(data)) for _, data in events(a.pieces)) for a in answers]
    assert counts == [EVENTS] * CONNECTIONS
    client.close()


async def aiohttp(url: str) -> None:
    import aiohttp

    async def one(session: aiohttp.ClientSession) -> None:
        count = 0
        async with session.post(url, data=BODY) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    count += bool(json.loads(line[6:]) and time.perf_counter())
        assert count == EVENTS

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(one(session) for _ in range(CONNECTIONS)))


async def httpx(url: str) -> None:
    import httpx

    async def one(client: httpx.AsyncClient) -> None:
        count = 0
        async with client.stream("POST", url, content=BODY) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    count += bool(json.loads(line[6:]) and time.perf_counter())
        assert count == EVENTS

    limits = httpx.Limits(max_connections=CONNECTIONS)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        await asyncio.gather(*(one(client) for _ in range(CONNECTIONS)))


async def _serve(port: multiprocessing.Queue[int]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(BODY))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                         b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")  # fmt: skip
            for _ in range(EVENTS):
                await asyncio.sleep(GAP)
                writer.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=256)
    port.put(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def _server(port: multiprocessing.Queue[int]) -> None:
    asyncio.run(_serve(port))


def main() -> None:
    port: multiprocessing.Queue[int] = multiprocessing.Queue()
    server = multiprocessing.Process(target=_server, args=(port,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{port.get()}"
    clients: list[Callable[[str], Awaitable[None]]] = [raw, aiohttp, httpx]
    seconds: dict[str, list[float]] = {client.__name__: [] for client in clients}
    for _ in range(ROUNDS):
        for client in clients:
            before = time.process_time()
            asyncio.run(client(url))  # type: ignore[arg-type]
            seconds[client.__name__].append(time.process_time() - before)
    for name, each in seconds.items():
        per_event = statistics.median(each) / (CONNECTIONS * EVENTS)
        print(f"{name:<8} {per_event * 1e6:6.1f} us of processor time an event")
    server.terminate()


if __name__ == "__main__":
    main()
