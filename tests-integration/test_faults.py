"""Servers that are killed, stopped or badly started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request

import pytest
from forks import run_command
from servers import PATIENCE, SLACK, alive, children_of, serving, slow_steps

from headrace_testing.waiting import wait_until


class _Stream(threading.Thread):
    """Reads a streamed completion in the background."""

    def __init__(self, server, max_tokens: int) -> None:
        super().__init__(daemon=True)
        body = {
            "prompt": "On and on", "max_tokens": max_tokens, "stream": True, "ignore_eos": True,
            "temperature": 1.0,
        }  # fmt: skip
        self._request = urllib.request.Request(
            server.api + "/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        self.lines: list[str] = []
        self.start()
        wait_until(lambda: len(self.lines) > 3, what="the stream did not begin")

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=PATIENCE) as response:
                for line in response:
                    if line.startswith(b"data: "):
                        self.lines.append(line[6:].decode().strip())
        except OSError:
            self.lines.append("connection lost")


@pytest.mark.req("REL-03")
def test_a_killed_engine_process_ends_streams_and_the_server():
    with serving("--engine-process", environment=slow_steps(0.02)) as server:
        [child] = children_of(server.process.pid)
        stream = _Stream(server, 1500)
        os.kill(child, signal.SIGKILL)
        assert server.process.wait(15 * SLACK) != 0
        stream.join(PATIENCE)
        assert any('"error"' in line for line in stream.lines), stream.lines[-3:]


@pytest.mark.req("REL-04")
def test_a_killed_server_takes_its_engine_process_along():
    with serving("--engine-process") as server:
        [child] = children_of(server.process.pid)
        server.stop(signal.SIGKILL)
        wait_until(lambda: not alive(child), 5 * SLACK, "the engine process lives on")


@pytest.mark.req("REL-09")
@pytest.mark.parametrize(
    "words", [(), ("--engine-process",)], ids=["one-process", "engine-process"]
)
def test_sigterm_lets_a_stream_finish_and_exits_with_0(words):
    with serving("--drain-timeout", "100", *words) as server:
        children = children_of(server.process.pid)
        stream = _Stream(server, 300)
        assert server.stop(signal.SIGTERM, 150) == 0
        stream.join(PATIENCE)
        assert stream.lines[-1] == "[DONE]"
        assert '"finish_reason":"length"' in stream.lines[-2].replace(" ", "")
        for child in children:
            assert not os.path.exists(f"/proc/{child}")


@pytest.mark.req("REL-09")
def test_past_the_drain_timeout_streams_get_an_error_event():
    with serving("--drain-timeout", "0.3", environment=slow_steps(0.02)) as server:
        stream = _Stream(server, 1800)
        assert server.stop(signal.SIGTERM) == 0
        stream.join(PATIENCE)
        assert any('"error"' in line for line in stream.lines), stream.lines[-3:]


def test_a_used_port_fails_before_anything_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_command("serve", "--port", str(port), timeout=2 * PATIENCE)
    assert done.returncode == 8
    last = done.stderr.strip().splitlines()[-1]
    assert "HR-NET-002" in last
    assert str(port) in last
    assert "load model" not in done.stderr


def test_unix_socket(tmp_path):
    path = str(tmp_path / "s")
    process = subprocess.Popen([sys.executable, "-m", "headrace", "serve", "--uds", path],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        wait_until(lambda: os.path.exists(path), 2 * PATIENCE)

        def healthy() -> bool:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(PATIENCE)
                try:
                    client.connect(path)
                    client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                    return b" 200 " in client.recv(200)
                except OSError:
                    return False

        wait_until(healthy, 2 * PATIENCE)
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0


@pytest.mark.req("REL-12")
def test_the_start_is_accounted_for_and_the_memory_planned():
    with serving() as server:
        log = "".join(server.log)
    for word in ("load model", "profile memory", "total", "KV cache", "weights", "room for"):
        assert word in log
