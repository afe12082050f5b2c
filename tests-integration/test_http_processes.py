"""``headrace serve --api-server-count``: one engine, several HTTP processes, real ones."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from servers import RunningServer, alive, children_of, serving, wait_for
from soak import Stream, run_stream

pytestmark = pytest.mark.spec("CLI-SERVE")
SIM = ("--device", "sim", "--sim-step-ms", "10", "--api-server-count", "2")
NUM_STREAMS = 24


@pytest.fixture
def private():
    """A folder for the server's temporary files; short, as socket names must be."""
    folder = tempfile.mkdtemp(prefix="http-")
    yield {"TMPDIR": folder}
    shutil.rmtree(folder, ignore_errors=True)


class Load(threading.Thread):
    """Streams in the background, each on a connection of its own.

    They begin one after the other: of connections that come at once, a process that the machine
    happens to run while the other waits for its turn takes all.
    """

    def __init__(self, url: str, length: int) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.streams = [Stream(seed, length) for seed in range(NUM_STREAMS)]
        self.start()
        wait_for(lambda: all(len(s.token_ids) > 3 for s in self.streams), 30, "no load")

    def run(self) -> None:
        asyncio.run(self._run_all())

    async def _run_all(self) -> None:
        await asyncio.gather(*map(self._run_one, self.streams))

    async def _run_one(self, stream: Stream) -> None:
        await asyncio.sleep(0.02 * stream.seed)
        try:
            await run_stream(self._url, stream, keep=False)
        except OSError:
            stream.events.append(b"connection lost")


def wait_for_all(server: RunningServer, times: int = 1) -> None:
    """Until all HTTP processes serve, for the first or a further time."""
    wait_for(
        lambda: sum("HTTP processes serve" in line for line in server.log) == times, 30, "not ready"
    )


def parts_of(server: RunningServer) -> tuple[int, list[int]]:
    """Process ids: the engine's, and the HTTP processes'."""
    found: dict[str, list[int]] = {"child": [], "process": []}
    for pid in children_of(server.process.pid):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "-m" in words:
            found.setdefault(words[words.index("-m") + 1].rpartition(".")[2], []).append(pid)
    [engine] = found["child"]
    return engine, found["process"]


def streams_of(pid: int) -> int:
    """Established connections of a process, by its descriptors."""
    inodes = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(path))
        except OSError:
            continue
        if match:
            inodes.add(match.group(1))
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    # A set: read while it changes, the table may name a connection twice.
    return len({line.split()[9] for line in lines if line.split()[3] == "01"} & inodes)


def load_on_each(server: RunningServer, processes: list[int]) -> tuple[list[Load], dict[int, int]]:
    """Streams that run, at least one by each process, and how many each has."""
    loads: list[Load] = []
    for _ in range(5):
        loads.append(Load(server.url, 600))
        shares = {pid: streams_of(pid) for pid in processes}
        if min(shares.values()) > 0:
            break
    assert min(shares.values()) > 0, shares
    assert sum(shares.values()) == NUM_STREAMS * len(loads), "some have ended, or others came"
    return loads, shares


def ask(server: RunningServer, text: str) -> str:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        server.api + "/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def test_several_processes_are_one_server():
    with serving("--api-server-count", "2", "--enable-server-load-tracking") as server:
        wait_for_all(server)
        answers: list[str] = []
        threads = [
            threading.Thread(target=lambda: answers.append(ask(server, "What is 12 + 7?")))
            for _ in range(30)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(answers) == 30
        assert len(set(answers)) == 1
        served = {rank for line in server.log for rank in re.findall(r"\((http \d)\).*POST", line)}
        assert served == {"http 0", "http 1"}
        for _ in range(6):  # whomever one asks
            assert server.metric("request_success_total") == 30
            assert server.metric("request_params_n_count") == 30
        with urllib.request.urlopen(server.url + "/load", timeout=10) as response:
            assert json.load(response) == {"server_load": 0}
        engine, processes = parts_of(server)
        assert server.stop() == 0
    assert not any(map(alive, [engine, *processes]))


@pytest.mark.req("REL-03")
@pytest.mark.req("REL-05")
def test_kill_9_of_an_http_process_harms_nobody_else(private):
    with serving(*SIM, environment=private) as server:
        wait_for_all(server)
        _, processes = parts_of(server)
        loads, shares = load_on_each(server, processes)
        victim = processes[0]
        os.kill(victim, signal.SIGKILL)
        # What it had asked for ends at once, the rest goes on.
        wait_for(
            lambda: server.metric("num_requests_running") <= shares[processes[1]], 5, "not freed"
        )
        wait_for(lambda: len(parts_of(server)[1]) == 2, 10, "nobody took its place")
        for load in loads:
            load.join(60)
        cut = [s for load in loads for s in load.streams if s.wrong]
        assert len(cut) == shares[victim]
        assert all(b"[DONE]" not in s.events for s in cut)
        wait_for(lambda: server.metric("num_requests_running") == 0, 5)
        assert server.metric("kv_cache_usage_perc") == 0
        wait_for_all(server, times=2)
        again = Load(server.url, 20)
        again.join(30)
        assert [s.wrong for s in again.streams if s.wrong] == []
        assert server.stop() == 0
    assert list(Path(private["TMPDIR"]).iterdir()) == []


@pytest.mark.req("REL-03")
@pytest.mark.req("REL-04")
def test_kill_9_of_the_engine_ends_every_stream_of_every_process(private):
    with serving(*SIM, environment=private) as server:
        wait_for_all(server)
        load = Load(server.url, 1500)
        engine, processes = parts_of(server)
        os.kill(engine, signal.SIGKILL)
        killed = time.monotonic()
        load.join(20)
        assert not load.is_alive()
        assert time.monotonic() - killed < 5
        assert server.process.wait(20) == 1
    for stream in load.streams:
        assert b'"error"' in stream.events[0], (stream.seed, stream.events[-2:])
        assert stream.events[1:] == [b"[DONE]"]
    assert not any(map(alive, processes))
    assert list(Path(private["TMPDIR"]).iterdir()) == []


@pytest.mark.req("REL-04")
def test_kill_9_of_the_supervisor_leaves_nothing_behind(private):
    with serving(*SIM, environment=private) as server:
        wait_for_all(server)
        engine, processes = parts_of(server)
        load = Load(server.url, 1500)
        server.process.kill()
        server.process.wait(10)
        wait_for(lambda: not any(map(alive, [engine, *processes])), 15, "somebody lives on")
        load.join(10)
        assert not load.is_alive()
    wait_for(lambda: not list(Path(private["TMPDIR"]).iterdir()), 5, "sockets were left")


@pytest.mark.req("REL-09")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_all_finish(number):
    with serving(*SIM) as server:
        wait_for_all(server)
        load = Load(server.url, 150)
        assert server.stop(number, 30) == 0
        load.join(10)
    assert [s.wrong for s in load.streams if s.wrong] == []


@pytest.mark.spec("API-PAUSE")
def test_a_pause_holds_everybody():
    words = ("--api-key", "k", "--enable-control-routes", "--enable-server-load-tracking")
    with serving(*SIM, *words) as server:
        wait_for_all(server)

        def post(path: str) -> None:
            request = urllib.request.Request(
                server.url + path, b"", {"authorization": "Bearer k"}, method="POST"
            )
            with urllib.request.urlopen(request, timeout=20) as response:
                assert response.status == 200

        post("/pause")
        for _ in range(8):
            assert server.status("/readyz") == 503
        post("/resume")
        for _ in range(8):
            assert server.status("/readyz") == 200


@pytest.mark.req("REL-11")
def test_an_engine_that_cannot_start_is_told_once(private):
    with (
        pytest.raises(RuntimeError, match="the server ended") as caught,
        serving("--api-server-count", "3", "--kv-cache-memory-bytes", "10", environment=private),
    ):
        pass
    assert str(caught.value).count("headrace serve: HR-") == 1
    assert list(Path(private["TMPDIR"]).iterdir()) == []
