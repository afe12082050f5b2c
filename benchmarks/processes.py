"""Processes that are measured: started, watched, stopped. What else the machine does meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Failed(Exception):
    """An engine did not start, ended, or answered something else than it was asked for."""


class Launch(NamedTuple):
    """How a process is started."""

    command: Sequence[str]
    environment: Mapping[str, str]
    """In addition to this process's."""
    unset: Sequence[str] = ()
    """Variables that it must not see."""

    def start(self, log: Path, **pipes: Any) -> subprocess.Popen[str]:
        """Start it in a session of its own; what it says goes to ``log``."""
        environment = {k: v for k, v in os.environ.items() if k not in self.unset}
        with log.open("a", encoding="utf-8") as file:
            pipes = {"stdout": file, **pipes}
            return subprocess.Popen(
                list(self.command), stderr=file, text=True, start_new_session=True,
                env={**environment, **self.environment}, **pipes,
            )  # fmt: skip


class Worker:
    """An engine behind ``worker.py``."""

    def __init__(self, launch: Launch, log: Path) -> None:
        self._log = log
        self.process = launch.start(log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            ready = self._answer()
        except Failed:
            stop(self.process)
            raise
        self.start_seconds: float = ready["ready"]
        self.version: str = ready["version"]

    def run(self, workload: str, salt: int, scale: float) -> dict[str, float]:
        """One run of one workload; its figures.

        Raises:
            Failed: the engine ended, or some output had another length than asked for.
        """
        assert self.process.stdin is not None
        command = {"workload": workload, "salt": salt, "scale": scale}
        print(json.dumps(command), file=self.process.stdin, flush=True)
        answer = self._answer()
        if answer["wrong_lengths"]:
            raise Failed(f"{workload}: {answer['wrong_lengths']} outputs of wrong length")
        figures: dict[str, float] = answer["figures"]
        return figures

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=20)
        stop(self.process)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            raise Failed(f"it ended with status {status}: {last_words(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def serving(launch: Launch, url: str, log: Path, seconds: float = 600.0) -> Iterator[int]:
    """A server that answers completions; gives its process id.

    Raises:
        Failed: it ended, or did not answer within ``seconds``.
    """
    process = launch.start(log)
    try:
        wait_for_token(process, url, log, seconds)
        yield process.pid
    finally:
        stop(process)


def wait_for_token(process: subprocess.Popen[str], url: str, log: Path, seconds: float) -> None:
    """Ask for one token until it comes.

    Raises:
        Failed: the process ended, or time is up.
    """
    deadline, model = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Failed(f"it ended with status {process.returncode}: {last_words(log)}")
        try:
            if model is None:
                with urllib.request.urlopen(url + "/v1/models", timeout=10) as response:
                    model = json.load(response)["data"][0]["id"]
            body = {"model": model, "prompt": [400, 401, 402], "max_tokens": 1, "temperature": 0}
            request = urllib.request.Request(
                url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )  # fmt: skip
            with urllib.request.urlopen(request, timeout=60) as response:
                json.load(response)["usage"]
            return
        except (OSError, ValueError, KeyError, IndexError):
            time.sleep(0.01)
    raise Failed(f"no token within {seconds:.0f} s: {last_words(log)}")


def stop(process: subprocess.Popen[str]) -> None:
    """End a process and what it started: first asked, then made to."""
    for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            continue
        if number == signal.SIGTERM and _group_alive(process.pid):
            time.sleep(2)
            continue
        return


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def last_words(log: Path) -> str:
    """The end of a log, on one line."""
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-500:]


def peak_memory_mib(pid: int) -> float:
    """The sum of the highest resident sizes of a process and of all that it started, in MiB."""
    total = 0
    for each in descendants(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{each}/status").read_text().splitlines():
                if line.startswith("VmHWM"):
                    total += int(line.split()[1])
    return total / 1024


def descendants(pid: int) -> list[int]:
    """A process and all that it started, directly or not."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


class Noise:
    """What others take of the machine: made before a measurement, asked after it."""

    def __init__(self) -> None:
        self._before = self._read()

    def figures(self) -> dict[str, float]:
        """``others_pct`` and ``steal_pct``: per cent of all cores' time since it was made."""
        busy, own, steal, total = (a - b for a, b in zip(self._read(), self._before))
        total = max(total, 1)
        return {
            "others_pct": round(max(0.0, 100 * (busy - own) / total), 1),
            "steal_pct": round(100 * steal / total, 1),
        }

    @staticmethod
    def _read() -> tuple[int, int, int, int]:
        """Ticks: busy, our own, taken by the host, all."""
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, idle, wait, irq, soft, steal = map(int, words)
        own = 0
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                own += sum(
                    map(int, fields[11:15])
                )  # utime, stime, and those of children that ended
        busy = user + nice + system + irq + soft
        return busy, own, steal, busy + idle + wait + steal


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
