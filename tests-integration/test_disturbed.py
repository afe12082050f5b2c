"""A server whose clock jumps, whose collector is silent, whose peers send what is far too large (F14)."""

from __future__ import annotations

import asyncio
import importlib.util
import mmap
import shutil
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from endurance import MIB, SIM, post, resident
from servers import PATIENCE, serving
from soak import Stream, run_stream

from headrace_testing.waiting import wait_until

CLOCK = Path(__file__).parent / "data" / "jumping_clock.c"
DAY = 86_400


@pytest.fixture(scope="module")
def jumping(tmp_path_factory):
    """(environment of a process whose wall clock jumps, how to make it jump)."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("a clock that jumps needs a C compiler")
    folder = tmp_path_factory.mktemp("clock")
    library, offset = folder / "clock.so", folder / "offset"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, CLOCK, "-ldl"], check=True)
    offset.write_bytes(bytes(8))
    with offset.open("r+b") as file, mmap.mmap(file.fileno(), 8) as page:

        def jump(seconds: int) -> None:
            page[:8] = struct.pack("=q", seconds)

        yield {"LD_PRELOAD": str(library), "JUMP_FILE": str(offset)}, jump


@pytest.mark.req("F14")
@pytest.mark.req("REL-20")
@pytest.mark.keep(1, every_value=False)
@pytest.mark.parametrize(
    "words", [(), ("--engine-process",)], ids=["one-process", "engine-process"]
)
def test_a_clock_that_jumps(jumping, words):
    """A day ahead, and two days back, in the middle of streams: nobody is timed out or kept waiting."""
    environment, jump = jumping
    with serving(*SIM, "--sim-step-ms", "20", *words, environment=environment) as server:

        async def streams_across(seconds: int) -> list[str]:
            streams = [Stream(seed, 60) for seed in range(8)]
            tasks = [asyncio.create_task(run_stream(server.url, stream)) for stream in streams]
            await asyncio.to_thread(
                wait_until, lambda: all(len(stream.token_ids) > 5 for stream in streams)
            )
            jump(seconds)
            await asyncio.gather(*tasks)
            return [stream.wrong for stream in streams if stream.wrong]

        for seconds in (DAY, -DAY, 0):
            assert asyncio.run(streams_across(seconds)) == []
            assert server.status("/health") == 200
            made = asyncio.run(post(server.url, "/v1/completions", {"prompt": "x"})).json()[
                "created"
            ]
            assert abs(made - time.time() - seconds) < 60, "the jump did not reach the server"
        assert server.stop() == 0


@pytest.mark.req("F14")
@pytest.mark.req("REL-19")
@pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry") is None, reason="opentelemetry is not installed"
)
def test_a_collector_that_takes_and_never_answers():
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(1000)
        taken: list[socket.socket] = []

        def take() -> None:
            while True:
                try:
                    taken.append(hole.accept()[0])
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        url = f"http://127.0.0.1:{hole.getsockname()[1]}/v1/traces"
        with serving(*SIM, "--otlp-traces-endpoint", url) as server:
            for first in (0, 100, 200):  # more spans than one batch
                streams = [Stream(first + seed, 20) for seed in range(100)]

                async def all_of(streams: list[Stream]) -> None:
                    await asyncio.gather(*(run_stream(server.url, stream) for stream in streams))

                asyncio.run(all_of(streams))
                assert [stream.wrong for stream in streams if stream.wrong] == []
            wait_until(lambda: len(taken) > 0, what="nothing was ever sent to the collector")
            assert server.stop() == 0
        hole.shutdown(socket.SHUT_RDWR)
        for connection in taken:
            connection.close()


@pytest.mark.req("F14")
@pytest.mark.req("SEC-20")
def test_a_head_of_ten_megabytes():
    """The head is refused long before its end, and costs hardly any memory."""
    with serving(*SIM) as server:
        address = urlsplit(server.url)
        asyncio.run(post(server.url, "/v1/completions", {"prompt": "x"}))
        before = resident(server.process.pid)
        for _ in range(5):
            with socket.create_connection((address.hostname, address.port), PATIENCE) as client:
                sent, answer = _send(client, b"GET /health HTTP/1.1\r\nHost: x\r\nA: ", 10 * MIB)
            assert sent < 10 * MIB or answer.startswith(b"HTTP/1.1 4")
            assert not answer or answer.startswith(b"HTTP/1.1 4")
        assert resident(server.process.pid) < before + 40 * MIB
        assert server.status("/health") == 200


def _send(client: socket.socket, head: bytes, size: int) -> tuple[int, bytes]:
    """(bytes that the server took, what it said)."""
    sent, answer = 0, b""
    try:
        client.sendall(head)
        while sent < size:
            client.sendall(b"a" * 65536)
            sent += 65536
        answer = client.recv(4096)
    except OSError:
        pass  # it was closed in our face
    return sent, answer
