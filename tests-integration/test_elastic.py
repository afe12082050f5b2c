"""``POST /scale_elastic_ep``: engines that come and go while requests run; real processes and sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from lora_adapters import demo_adapter
from servers import PATIENCE, RunningServer, alive, children_of, serving

from headrace_testing.waiting import wait_until

SIM = ("--device", "sim", "--sim-step-ms", "5", "--enable-elastic-ep", "--dev-mode")
CONTROL = ("--enable-elastic-ep", "--dev-mode")
BODY = {"seed": 1, "max_tokens": 40}


def call(
    server: RunningServer, path: str, body: dict[str, Any] | None = None, **headers: str
) -> tuple[int, Any]:
    """Status and body of a request: a POST if it has a body."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", **headers}
    asked = urllib.request.Request(server.url + path, data, headers)
    try:
        with urllib.request.urlopen(asked, timeout=PATIENCE) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def scale(server: RunningServer, size: int, **more: Any) -> tuple[int, Any]:
    return call(server, "/scale_elastic_ep", {"new_data_parallel_size": size, **more})


def is_scaling(server: RunningServer) -> bool:
    return bool(call(server, "/is_scaling_elastic_ep")[1]["is_scaling_elastic_ep"])


def engines(server: RunningServer) -> set[int]:
    """Process ids of the engines."""
    found = set()
    for pid in children_of(server.process.pid):
        try:
            argv = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"clients.child" in argv:
            found.add(pid)
    return found


def on_engine(server: RunningServer, rank: int, **body: Any) -> tuple[int, Any]:
    return call(server, "/v1/completions", {"prompt": "a b c", **BODY, **body},
                **{"X-data-parallel-rank": str(rank)})  # fmt: skip


class Streams:
    """Completions as streams, one after another in each of some threads, until :meth:`end`."""

    def __init__(self, server: RunningServer, count: int) -> None:
        self.texts: list[list[str]] = []
        """Pieces of each stream."""
        self.errors: list[Any] = []
        self._server, self._stop = server, threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.texts.append(self._stream())
            except Exception as error:
                self.errors.append(error)

    def _stream(self) -> list[str]:
        body = {"prompt": "tell me", "seed": 1, "max_tokens": 60, "stream": True}
        asked = urllib.request.Request(self._server.url + "/v1/completions", json.dumps(body).encode(),
                                       {"content-type": "application/json"})  # fmt: skip
        pieces: list[str] = []
        with urllib.request.urlopen(asked, timeout=PATIENCE) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    pieces.append(choice["text"])
        assert line.strip() == b"" or line.strip() == b"data: [DONE]"
        return pieces

    def wait_for(self, more: int) -> None:
        """Until so many further streams have ended."""
        wanted = len(self.texts) + more
        wait_until(lambda: self.errors or len(self.texts) >= wanted, what="streams do not go on")

    def end(self) -> list[list[str]]:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        return self.texts


@pytest.fixture(scope="module")
def server():
    with serving(*SIM) as running:
        yield running


def test_streams_are_whole_while_engines_come_and_go():
    with serving(*SIM) as server:
        assert call(server, "/server_info")[1]["engine"]["parallel"]["data_parallel_size"] == 1
        first = engines(server)
        assert len(first) == 1
        streams = Streams(server, 6)
        streams.wait_for(2)
        status, told = scale(server, 3)
        assert (status, told["data_parallel_size"], told["num_ended_requests"]) == (200, 3, 0)
        grown = engines(server)
        assert len(grown) == 3
        assert first < grown
        streams.wait_for(8)
        by_rank = [on_engine(server, rank) for rank in range(3)]
        assert [status for status, _ in by_rank] == [200] * 3
        assert len({answer["choices"][0]["text"] for _, answer in by_rank}) == 1
        assert server.metric("num_engines") == 3
        assert call(server, "/server_info")[1]["engine"]["parallel"]["data_parallel_size"] == 3
        status, told = scale(server, 2)
        assert (status, told["num_ended_requests"]) == (200, 0)
        assert server.metric("num_engines") == 2
        assert not is_scaling(server)
        shrunk = engines(server)
        assert len(shrunk) == 2
        assert shrunk < grown
        assert not any(map(alive, grown - shrunk))
        streams.wait_for(6)
        texts = streams.end()
        assert streams.errors == []
        assert len({"".join(pieces) for pieces in texts}) == 1  # all whole
        status, refused = on_engine(server, 2)
        assert status == 400
        assert "0 to 1" in refused["error"]["message"]
        assert server.stop() == 0
    assert not any(map(alive, grown))


def test_a_killed_newcomer_leaves_the_old_number(server):
    before = engines(server)
    answers: list[tuple[int, Any]] = []
    asking = threading.Thread(
        target=lambda: answers.append(scale(server, len(before) + 2)), daemon=True
    )
    asking.start()
    wait_until(lambda: engines(server) - before, what="no new engine")
    os.kill((engines(server) - before).pop(), signal.SIGKILL)
    asking.join(PATIENCE)
    ((status, told),) = answers
    assert status == 500
    message = told["error"]["message"]
    assert "did not start: the engine process ended while starting (killed by signal 9)" in message
    assert f"{len(before)} engine" in message
    wait_until(lambda: engines(server) == before, what="an engine is left")
    assert on_engine(server, 0)[0] == 200
    assert scale(server, 1)[0] == 200


def test_the_scaling_goes_on_when_its_client_leaves(server):
    assert scale(server, 1)[0] == 200
    host = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=PATIENCE)
    connection.request("POST", "/scale_elastic_ep", json.dumps({"new_data_parallel_size": 2}),
                       {"content-type": "application/json"})  # fmt: skip
    wait_until(lambda: is_scaling(server), what="it has not begun")
    assert scale(server, 3)[0] == 409
    connection.close()
    wait_until(lambda: not is_scaling(server), what="it does not end")
    assert server.metric("num_engines") == 2
    assert on_engine(server, 1)[0] == 200


def test_a_pause_holds_for_new_engines(server):
    assert scale(server, 1)[0] == 200
    paused, resumed = (
        urllib.request.Request(server.url + path, b"") for path in ("/pause", "/resume")
    )
    urllib.request.urlopen(paused, timeout=PATIENCE).close()
    answers: list[tuple[int, Any]] = []
    waiting = threading.Thread(target=lambda: answers.append(on_engine(server, 1)), daemon=True)
    assert scale(server, 2)[0] == 200
    waiting.start()
    wait_until(lambda: server.metric("num_requests_waiting") == 1, what="it does not wait")
    assert answers == []
    urllib.request.urlopen(resumed, timeout=PATIENCE).close()
    waiting.join(PATIENCE)
    assert [status for status, _ in answers] == [200]


def test_a_request_that_takes_too_long_is_told(server):
    assert scale(server, 2)[0] == 200
    answers: list[tuple[int, Any]] = []
    long = {"prompt": "a b", "max_tokens": 2000}
    running = threading.Thread(
        target=lambda: answers.append(on_engine(server, 1, **long)), daemon=True
    )
    running.start()
    wait_until(lambda: server.metric("num_requests_running") == 1, what="it does not run")
    before = engines(server)
    status, told = scale(server, 1, drain_timeout=0)
    assert (status, told["num_ended_requests"]) == (200, 1)
    running.join(PATIENCE)
    ((status, told),) = answers
    assert status == 503
    assert "engine 1 leaves" in told["error"]["message"]
    assert len(engines(server)) == 1
    assert sum(map(alive, before)) == 1
    assert server.status("/health") == 200


def test_a_server_that_ends_takes_its_newcomers_with_it():
    with serving(*SIM) as server:
        (first,) = engines(server)
        asking = threading.Thread(target=_ask_and_forget, args=(server, 4), daemon=True)
        asking.start()
        wait_until(lambda: len(engines(server)) == 4, what="no new engines")
        started = engines(server)
        assert server.stop() == 0
        asking.join(PATIENCE)
    assert first in started
    assert not any(map(alive, started))


def _ask_and_forget(server: RunningServer, size: int) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        scale(server, size)


@pytest.mark.parametrize(
    ("argv", "named"),
    [((), "--enable-elastic-ep"), (("-dp", "2", "--no-enable-elastic-ep"), "fixed at the start")],
)
def test_servers_that_are_not_scaled(argv, named):
    with serving("--device", "sim", "--dev-mode", *argv) as server:
        status, told = scale(server, 3)
        assert status == 400
        assert named in told["error"]["message"]


def test_a_new_engine_answers_as_the_first_with_adapters_that_came_at_run_time(tmp_path):
    demo_adapter(tmp_path / "one", 0)
    cores = len(os.sched_getaffinity(0))
    flags = ("--dtype", "float32", "--enforce-eager", "--num-threads", "1", "--max-num-seqs", "4",
             "--enable-lora", "--allow-runtime-lora-updating", "--max-memory-bytes", "600M")  # fmt: skip
    with serving(*flags, *CONTROL) as server:
        loaded = urllib.request.Request(
            server.url + "/v1/load_lora_adapter",
            json.dumps({"lora_name": "one", "lora_path": str(tmp_path / "one")}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(loaded, timeout=PATIENCE) as response:
            assert response.status == 200
        status, told = scale(server, 65)
        assert (status, told["error"]["param"]) == (400, "new_data_parallel_size")
        assert "must be at most 64" in told["error"]["message"]
        if cores < 64:
            status, told = scale(server, cores + 1)
            assert status == 400
            assert f"there are {cores} cores" in told["error"]["message"]
        assert scale(server, 2)[0] == 200
        for model in ("headrace-demo", "one"):
            greedy = {"model": model, "prompt": "What is 12 + 7?", "temperature": 0, "logprobs": 2}
            (one, first), (two, second) = (on_engine(server, rank, **greedy) for rank in (0, 1))
            assert one == two == 200, (first, second)
            assert first["choices"] == second["choices"]
