"""Media of clients that have left: neither fetched nor decoded to the end."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from image_checkpoints import save_qwen2_vl
from servers import serving

from headrace_engine.input_processing.media import MediaReader
from headrace_engine.input_processing.media_items import FileReading, Later
from headrace_engine.input_processing.threads import InputThreads
from headrace_multimodal.decoder_turns import DecodeJob, DecoderTurns
from headrace_multimodal.reading import current, reading

WORDS = (
    "--dtype", "float32", "--max-model-len", "256", "--block-size", "8", "--kv-cache-memory-bytes",
    "16777216", "--allow-private-media",
)  # fmt: skip


class HangingHost:
    """Takes connections and answers none; knows which were closed by the other side."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/1.png"
        self.asked, self.closed = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._watch, args=(connection,), daemon=True).start()

    def _watch(self, connection: socket.socket) -> None:
        with connection:
            connection.recv(65536)
            self.asked.release()
            while connection.recv(65536):
                pass
        self.closed.release()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def host() -> Iterator[HangingHost]:
    made = HangingHost()
    yield made
    made.close()


@contextmanager
def asking(url: str, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request on a connection of its own, which nobody has read an answer from."""
    parts, content = urlsplit(url), json.dumps(body).encode()
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        yield connection


def test_a_fetch_ends_with_its_client(host: HangingHost, tmp_path: Path) -> None:
    save_qwen2_vl(tmp_path)
    part = {"type": "image_url", "image_url": {"url": host.url}}
    source = {"type": "image", "source": {"type": "url", "url": host.url}}
    item = {"type": "input_image", "image_url": host.url}
    patient = {**os.environ, "HEADRACE_IMAGE_FETCH_TIMEOUT": "600"}
    words = (str(tmp_path), *WORDS, "--served-model-name", "seer")
    with serving(*words, environment=patient) as server:
        for path, more in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]}),
            ("/v1/messages",
             {"max_tokens": 1, "messages": [{"role": "user", "content": [source]}]}),
            ("/v1/responses", {"input": [{"role": "user", "content": [item]}]}),
        ):  # fmt: skip
            for stream in (False, True):
                body = {"model": "seer", "stream": stream, **more}
                with asking(server.url, path, body):
                    assert host.asked.acquire(timeout=60), path
                    assert not host.closed.acquire(blocking=False), path
                assert host.closed.acquire(timeout=60), (path, stream)


class _NoProcessor:
    """Takes images, and never comes to see one."""

    def modalities(self) -> tuple[str, ...]:
        return ("image",)


def test_a_queued_decode_ends_with_its_caller() -> None:
    queued, left = threading.Event(), threading.Event()

    def clock() -> float:
        """Read by whoever waits, once it stands in the queue."""
        if turns.num_waiting:
            queued.set()
        return 0.0

    turns = DecoderTurns([object()], 1.0, clock=clock)  # type: ignore[list-item]
    assert turns.wait(DecodeJob(current()), 60) is not None

    def decode(fetched: object) -> object:
        try:
            return turns.wait(DecodeJob(current()), 600)
        finally:
            left.set()

    reader = MediaReader(
        _NoProcessor(), lambda *_: "", files=FileReading(during=reading)  # type: ignore[arg-type]
    )  # fmt: skip
    later = Later(lambda: b"file", decode)
    prompt: Any = {"prompt": "x", "multi_modal_data": {"image": later}}

    async def leave() -> None:
        threads = InputThreads(None, 1)  # type: ignore[arg-type]
        work = threads.run(prompt, lambda: reader.place([1], {"image": later}, None))
        task = asyncio.create_task(work)
        queues = await asyncio.to_thread(queued.wait, 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert queues
        assert await asyncio.to_thread(left.wait, 60)
        threads.close()

    asyncio.run(asyncio.wait_for(leave(), 60))
    assert (turns.num_waiting, turns.num_running) == (0, 1)
