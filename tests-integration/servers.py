"""Real servers in processes of their own, started on free ports and ended by process id."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from forks import Process, start

from headrace_testing.waiting import wait_until

START_SECONDS = 120.0
PATIENCE = 60.0
"""Seconds after which a test gives up waiting; nothing waits that long unless it is broken."""
SLACK = 4
"""Times a promise in seconds: the machine may be busy with other tests, and where the promise is broken
nothing comes at all, or only when what was asked for ends by itself, later than that."""


@dataclass
class RunningServer:
    """A ``headrace serve`` that answers."""

    process: Process
    url: str = ""
    log: list[str] = field(default_factory=list)

    @property
    def api(self) -> str:
        return self.url + "/v1"

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=PATIENCE) as response:
            text = response.read().decode()
        values = re.findall(rf"^headrace:{name}(?:\{{.*\}})? ([0-9.e+-]+)$", text, re.MULTILINE)
        assert values, f"metric {name} is absent"
        return sum(map(float, values))

    def status(self, path: str) -> int:
        """HTTP status of a GET."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=PATIENCE) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    def stop(self, number: int = signal.SIGTERM, timeout: float = PATIENCE) -> int:
        """Send a signal and wait; returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout)


@contextmanager
def serving(
    *words: str, environment: dict[str, str] | None = None, fresh: bool = False
) -> Iterator[RunningServer]:
    """Start ``headrace serve WORDS --port 0`` and wait until it answers.

    A fork serves, unless its environment or ``fresh`` asks for a fresh interpreter (see :mod:`forks`).
    """
    with running("serve", *words, environment=environment, fresh=fresh) as server:
        yield server


@contextmanager
def running(
    *words: str, environment: dict[str, str] | None = None, fresh: bool = False
) -> Iterator[RunningServer]:
    """:func:`serving`, of any command that serves: its name comes first."""
    words = (*words, "--port", "0")
    process = start(*words, environment=environment, stderr=subprocess.STDOUT, fresh=fresh)
    server = RunningServer(process)
    reader = threading.Thread(target=_read, args=(server,), daemon=True)
    reader.start()
    try:
        _wait_until_ready(server, reader)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
        reader.join(PATIENCE)


class WatchedCommand:
    """A process whose output is read as it comes; it is killed when the block ends."""

    def __init__(self, process: Process, output: Iterable[str]) -> None:
        self.process = process
        self.text = ""
        """Its output so far."""
        self._output = output
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *reason):
        self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)

    @property
    def has_ended(self) -> bool:
        """All of its output was read."""
        return not self._reader.is_alive()

    def _read(self) -> None:
        for piece in self._output:
            self.text += piece


def _read(server: RunningServer) -> None:
    assert server.process.stdout is not None
    for line in server.process.stdout:
        server.log.append(line)
        found = re.search(r"serving at (http://[^\s\"]+)", line)
        if found:
            server.url = found.group(1)


def _wait_until_ready(server: RunningServer, reader: threading.Thread) -> None:
    def is_ready() -> bool:
        if server.process.poll() is not None:
            reader.join(PATIENCE)  # its last words
            raise RuntimeError("the server ended:\n" + "".join(server.log))
        try:
            return bool(server.url) and server.status("/health") == 200
        except OSError:
            return False

    try:
        wait_until(is_ready, START_SECONDS)
    except AssertionError:
        raise RuntimeError("the server did not answer:\n" + "".join(server.log)) from None


@contextmanager
def free_port() -> Iterator[int]:
    """A port of loopback that nobody else is given meanwhile: bound here, for others to listen on."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


def slow_steps(seconds: float, match: str = "") -> dict[str, str]:
    """Environment in which a step takes so much longer for each request whose id holds ``match``: what
    must still run when a test comes to it does, however late the test is."""
    return {"HEADRACE_FAILPOINTS": f"engine.step.forward=delay(match={match},seconds={seconds})"}


def children_of(pid: int) -> list[int]:
    """Direct children of a process, but for the one that looks for them."""
    words = ["ps", "-o", "pid=", "--ppid", str(pid)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as looking:
        found, _ = looking.communicate()
    return [child for word in found.split() if (child := int(word)) != looking.pid]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
