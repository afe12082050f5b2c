"""Engine processes that are killed or frozen under load, and clients that leave.

Three kills and a hundred disconnects by default; ``HEADRACE_KILLS=20`` and ``HEADRACE_DISCONNECTS=1000``
for as many as the promises name.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from servers import PATIENCE, SLACK, alive, children_of, serving
from soak import Stream, run_stream

from headrace_testing.waiting import until, wait_until

SIM = ("--device", "sim", "--sim-step-ms", "10", "--disable-uvicorn-access-log")
NUM_KILLS = int(os.environ.get("HEADRACE_KILLS", "3"))
NUM_DISCONNECTS = int(os.environ.get("HEADRACE_DISCONNECTS", "100"))
NUM_STREAMS = 50


class _Load(threading.Thread):
    """Fifty streams in the background."""

    def __init__(self, url: str, length: int = 1500) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.streams = [Stream(seed, length) for seed in range(NUM_STREAMS)]
        self.start()
        wait_until(lambda: all(len(s.token_ids) > 3 for s in self.streams), what="no load")

    def run(self) -> None:
        asyncio.run(self._run_all())

    async def _run_all(self) -> None:
        await asyncio.gather(*(self._run_one(stream) for stream in self.streams))

    async def _run_one(self, stream: Stream) -> None:
        try:
            await run_stream(self._url, stream, keep=False)
        except OSError:
            stream.events.append(b"connection lost")


@pytest.fixture
def private():
    """A folder for the server's temporary files; short, as socket names must be."""
    folder = tempfile.mkdtemp(prefix="kill-")
    yield {"TMPDIR": folder}
    shutil.rmtree(folder, ignore_errors=True)


def _left_behind(private) -> list[str]:
    """Temporary files of the server, and shared memory of ours."""
    found = [*Path(private["TMPDIR"]).iterdir(), *Path("/dev/shm").glob("*headrace*")]
    return sorted(map(str, found))


@pytest.mark.req("REL-03")
@pytest.mark.req("REL-04")
@pytest.mark.req("F1")
@pytest.mark.keep(1, every_value=False)
@pytest.mark.parametrize("number", range(NUM_KILLS))
def test_kill_9_of_the_engine_process_under_load(number, private):
    with serving(*SIM, "--engine-process", environment=private) as server:
        assert _left_behind(private)  # the folder of sockets
        [child] = children_of(server.process.pid)
        load = _Load(server.url)
        most = 4 + 10 * (number % 7)  # each in another step
        wait_until(lambda: all(len(s.token_ids) >= most for s in load.streams))
        os.kill(child, signal.SIGKILL)
        load.join(5 * SLACK)
        assert not load.is_alive()
        assert server.process.wait(15 * SLACK) == 1
    for stream in load.streams:
        assert stream.status == 200
        assert b'"error"' in stream.events[0], (stream.seed, stream.events[-2:])
        assert stream.events[1:] == [b"[DONE]"]
    assert not alive(child)
    assert _left_behind(private) == []


@pytest.mark.req("REL-04")
def test_a_killed_server_leaves_nothing_behind(private):
    with serving(*SIM, "--engine-process", environment=private) as server:
        [child] = children_of(server.process.pid)
        load = _Load(server.url)
        server.process.kill()
        server.process.wait(PATIENCE)
        load.join(PATIENCE)
        wait_until(lambda: not alive(child), 5 * SLACK, "the engine process lives on")
    wait_until(lambda: not _left_behind(private), what="a folder of sockets was left")


@pytest.mark.req("REL-02")
@pytest.mark.req("F2")
def test_a_frozen_engine_process_is_told_and_recovers():
    with serving(*SIM, "--engine-process") as server:
        [child] = children_of(server.process.pid)
        load = _Load(server.url, 400)
        os.kill(child, signal.SIGSTOP)
        try:
            wait_until(lambda: server.status("/health") == 503, 10 * SLACK, "nobody noticed")
            assert server.status("/readyz") == 503
        finally:
            os.kill(child, signal.SIGCONT)
        wait_until(lambda: server.status("/health") == 200, what="it did not recover")
        load.join(3 * PATIENCE)
        assert [s.wrong for s in load.streams if s.wrong] == []


@pytest.mark.req("REL-02")
def test_a_step_that_hangs_is_told_and_recovers():
    plan = "engine.step.forward=delay(match=victim,seconds=9,times=1)"
    words = ("--heartbeat-limit", "2")  # the other seven seconds are for who asks
    with serving(*SIM, *words, environment={"HEADRACE_FAILPOINTS": plan}) as server:
        asking = threading.Thread(
            target=lambda: asyncio.run(
                run_stream(server.url, Stream(1, 5), headers="X-Request-Id: victim\r\n")
            )
        )
        asking.start()
        wait_until(lambda: server.status("/health") == 503, what="nobody noticed")
        asking.join(PATIENCE)
        wait_until(lambda: server.status("/health") == 200, what="it did not recover")


@pytest.mark.req("REL-05")
@pytest.mark.req("REL-10")
@pytest.mark.req("F3")
def test_disconnects_free_everything():
    """Of requests that wait, that compute their prompts and that stream; thrice, files counted."""
    words = ("--max-num-seqs", "16", "--sim-token-us", "20", "--sim-step-ms", "40")
    with serving(*SIM, *words) as server:
        files = []
        for _ in range(3):
            asyncio.run(_connect_and_leave(server.url, NUM_DISCONNECTS))
            wait_until(
                lambda: (
                    server.metric("num_requests_running") == 0
                    and server.metric("num_requests_waiting") == 0
                ),
                5 * SLACK,  # one that goes on takes a minute
                "work goes on",
            )
            assert server.metric("kv_cache_usage_perc") == 0
            files.append(_settled(lambda: len(os.listdir(f"/proc/{server.process.pid}/fd"))))
        assert files[2] <= files[1] + 2
        threads = subprocess.run(
            ["ps", "-o", "nlwp=", "-p", str(server.process.pid)], capture_output=True, text=True
        )
        assert int(threads.stdout) < 20


def _settled(count: Callable[[], int]) -> int:
    """The count once it has been the same for a second: connections are closed a little later."""
    found = [count()]
    wait_until(lambda: found.append(count()) or (len(found) > 20 and len(set(found[-20:])) == 1))
    return found[-1]


async def _connect_and_leave(url: str, number: int) -> None:
    """Each leaves at a moment of its own."""
    patience = max(PATIENCE, number * 0.3)  # sixteen at a time, up to 36 steps of 40 ms

    async def one(seed: int) -> None:
        stream = Stream(seed, 1500)
        running = asyncio.create_task(run_stream(url, stream, prompt="long " * (seed % 5 * 50 + 1)))
        await until(lambda: running.done() or len(stream.token_ids) >= seed % 37, patience)
        assert not running.done(), (stream.status, stream.events)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    await asyncio.gather(*(one(seed) for seed in range(number)))


@pytest.mark.req("REL-09")
@pytest.mark.req("F9")
@pytest.mark.keep(1, every_value=False)
@pytest.mark.parametrize(
    "words", [(), ("--engine-process",)], ids=["one-process", "engine-process"]
)
def test_sigterm_with_fifty_streams_lets_all_finish(words):
    with serving(*SIM, "--drain-timeout", "120", *words) as server:
        load = _Load(server.url, 400)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.status("/readyz") == 503, 1 * SLACK, "it is still ready")
        assert server.process.wait(150) == 0
        load.join(PATIENCE)
    assert [s.wrong for s in load.streams if s.wrong] == []


@pytest.mark.req("REL-09")
@pytest.mark.req("F9")
def test_past_the_drain_timeout_fifty_streams_get_an_error_event():
    with serving(*SIM, "--drain-timeout", "0.5") as server:
        load = _Load(server.url, 1500)
        assert server.stop(signal.SIGTERM) == 0
        load.join(PATIENCE)
    for stream in load.streams:
        assert b'"error"' in stream.events[0], (stream.seed, stream.events[-2:])
        assert stream.events[1:] == [b"[DONE]"]


@pytest.mark.req("REL-09")
@pytest.mark.req("F9")
def test_a_second_signal_ends_fifty_streams_at_once():
    with serving(*SIM, "--drain-timeout", "120") as server:
        load = _Load(server.url, 1500)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.status("/readyz") == 503, what="it is still ready")
        server.stop(signal.SIGTERM, timeout=2 * SLACK)
        load.join(PATIENCE)
