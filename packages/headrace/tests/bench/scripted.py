"""A server whose answers are written down beforehand, on a real socket, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Step = tuple[float, bytes]
"""Seconds to wait, then bytes of body to send."""


def event(content: Any) -> bytes:
    """A server-sent event."""
    return (
        b"data: "
        + (content if isinstance(content, bytes) else json.dumps(content).encode())
        + b"\n\n"
    )


def token(text: str, finish: str | None = None, **more: Any) -> bytes:
    """An event of a completion."""
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more})


def usage(prompt: int, completion: int, **more: Any) -> bytes:
    """The event at the end."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, **more}
    return event({"choices": [], "usage": counts})


DONE = event(b"[DONE]")


def completion(num_tokens: int, gap: float = 0.001, prompt: int = 8) -> list[Step]:
    """A plain answer: a token every ``gap`` seconds, then usage."""
    steps = [(gap, token(f" t{i}")) for i in range(num_tokens)]
    return [*steps, (0.0, usage(prompt, num_tokens)), (0.0, DONE)]


@dataclass
class Scripted:
    """The server's side of a test."""

    answer: Callable[[dict[str, Any]], Sequence[Step]]
    """Request's JSON -> what is sent back."""
    status: int = 200
    port: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    num_connections: int = 0
    running: int = 0
    most_running: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                self.headers.append(head)
                lengths = [x for x in head.split("\r\n") if x.lower().startswith("content-length")]
                body = await reader.readexactly(int(lengths[0].split(":")[1])) if lengths else b""
                await self._answer(head.split(" ")[1], body, writer)
        writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            data = json.dumps({"data": [{"id": "scripted"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
            return
        content = json.loads(body)
        self.requests.append(content)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        writer.write(b"HTTP/1.1 %d X\r\nTransfer-Encoding: chunked\r\n\r\n" % self.status)
        for seconds, data in self.answer(content):
            await asyncio.sleep(seconds)
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        self.running -= 1


@contextlib.contextmanager
def serving(server: Scripted) -> Iterator[Scripted]:
    """Run it while the block runs."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    over = asyncio.Event()

    async def main() -> None:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", server.port)
        server.port = listening.sockets[0].getsockname()[1]
        ready.set()
        await over.wait()
        listening.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def run() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(main())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
