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
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from http_parts import only, parts_of, wait_for_all
from servers import PATIENCE, SLACK, RunningServer, alive, serving
from soak import Stream, run_stream

from headrace_testing.waiting import wait_until

SIM = ("--device", "sim", "--sim-step-ms", "10", "--api-server-count", "2")
NUM_STREAMS, NUM_KEPT = 24, 8


@pytest.fixture
def private():
    """A folder for the server's temporary files; short, as socket names must be."""
    folder = tempfile.mkdtemp(prefix="http-")
    yield {"TMPDIR": folder}
    shutil.rmtree(folder, ignore_errors=True)


class Load(threading.Thread):
    """Streams in the background, each on a connection of its own."""

    def __init__(self, url: str, length: int, count: int = NUM_STREAMS) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.streams = [Stream(seed, length) for seed in range(count)]
        self.start()
        wait_until(lambda: all(len(s.token_ids) > 3 for s in self.streams), what="no load")

    def run(self) -> None:
        asyncio.run(self._run_all())

    async def _run_all(self) -> None:
        await asyncio.gather(*map(self._run_one, self.streams))

    async def _run_one(self, stream: Stream) -> None:
        try:
            await run_stream(self._url, stream, keep=False)
        except OSError:
            stream.events.append(b"connection lost")


def patiently(ask: Callable[[], Any]) -> Any:
    """What all processes together tell; again while one of them is too slow to answer another."""
    answers: list[Any] = []

    def answered() -> bool:
        try:
            answers.append(ask())
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
        return bool(answers)

    wait_until(answered, what="one of them answers no other")
    return answers[0]


def metric(server: RunningServer, name: str) -> float:
    return patiently(lambda: server.metric(name))


def load_of(server: RunningServer) -> int:
    with urllib.request.urlopen(server.url + "/load", timeout=PATIENCE) as response:
        return json.load(response)["server_load"]


def ranks_that_served(server: RunningServer) -> set[str]:
    """By the access log."""
    return {rank for line in server.log for rank in re.findall(r"\((http \d)\).*POST", line)}


def ask(server: RunningServer, text: str) -> str:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        server.api + "/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def ask_at_once(server: RunningServer, times: int) -> list[str]:
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(server, "What is 12 + 7?")))
        for _ in range(times)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(answers) == times
    return answers


def test_several_processes_are_one_server():
    with serving("--api-server-count", "2", "--enable-server-load-tracking") as server:
        wait_for_all(server)
        engine, processes = parts_of(server)
        answers = ask_at_once(server, 10)
        for process in processes:
            with only(process, processes):
                answers += ask_at_once(server, 10)
        assert len(set(answers)) == 1
        wait_until(lambda: ranks_that_served(server) == {"http 0", "http 1"})
        wait_until(lambda: metric(server, "request_success_total") >= 30)
        for _ in range(6):  # whomever one asks
            assert metric(server, "request_success_total") == 30
            assert metric(server, "request_params_n_count") == 30
        wait_until(lambda: patiently(lambda: load_of(server)) == 0)
        assert server.stop() == 0
    assert not any(map(alive, [engine, *processes]))


@pytest.mark.req("REL-03")
@pytest.mark.req("REL-05")
def test_kill_9_of_an_http_process_harms_nobody_else(private):
    with serving(*SIM, "--sim-step-ms", "20", environment=private) as server:
        wait_for_all(server)
        _, (victim, survivor) = parts_of(server)
        with only(victim, [victim, survivor]):
            cut = Load(server.url, 1500)  # half a minute, and no less
        with only(survivor, [victim, survivor]):
            kept = Load(server.url, 200, NUM_KEPT)
        os.kill(victim, signal.SIGKILL)
        # What it had asked for ends at once, and not when it would have ended; the rest goes on.
        wait_until(
            lambda: metric(server, "num_requests_running") <= NUM_KEPT, 5 * SLACK, "not freed"
        )
        kept.join(PATIENCE)
        cut.join(PATIENCE)
        assert [s.wrong for s in kept.streams if s.wrong] == []
        assert all(s.wrong for s in cut.streams)
        assert all(b"[DONE]" not in s.events for s in cut.streams)
        wait_until(lambda: metric(server, "num_requests_running") == 0)
        assert metric(server, "kv_cache_usage_perc") == 0
        wait_for_all(server, times=2)
        again = Load(server.url, 20)
        again.join(PATIENCE)
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
        load.join(5 * SLACK)
        assert not load.is_alive()
        assert server.process.wait(PATIENCE) == 1
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
        server.process.wait(PATIENCE)
        wait_until(lambda: not any(map(alive, [engine, *processes])), what="somebody lives on")
        load.join(PATIENCE)
        assert not load.is_alive()
    wait_until(lambda: not list(Path(private["TMPDIR"]).iterdir()), what="sockets were left")


@pytest.mark.req("REL-09")
@pytest.mark.keep(1, every_value=False)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_all_finish(number):
    with serving(*SIM, "--drain-timeout", "120") as server:
        wait_for_all(server)
        load = Load(server.url, 150)
        assert server.stop(number, 150) == 0
        load.join(PATIENCE)
    assert [s.wrong for s in load.streams if s.wrong] == []


def test_a_pause_holds_everybody():
    words = ("--api-key", "k", "--enable-control-routes", "--enable-server-load-tracking")
    with serving(*SIM, *words) as server:
        wait_for_all(server)

        def post(path: str) -> None:
            request = urllib.request.Request(
                server.url + path, b"", {"authorization": "Bearer k"}, method="POST"
            )
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                assert response.status == 200

        _, processes = parts_of(server)
        for path, status in (("/pause", 503), ("/resume", 200)):
            patiently(lambda: post(path))  # noqa: B023
            for process in processes:
                with only(process, processes):
                    assert server.status("/readyz") == status


@pytest.mark.req("REL-11")
def test_an_engine_that_cannot_start_is_told_once(private):
    with (
        pytest.raises(RuntimeError, match="the server ended") as caught,
        serving("--api-server-count", "3", "--kv-cache-memory-bytes", "10", environment=private),
    ):
        pass
    assert str(caught.value).count("headrace serve: HR-") == 1
    assert list(Path(private["TMPDIR"]).iterdir()) == []
