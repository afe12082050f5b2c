"""The processes of a server with several HTTP processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers import RunningServer, children_of

from headrace_testing.waiting import wait_until


def wait_for_all(server: RunningServer, times: int = 1) -> None:
    """Until all HTTP processes serve, for the first or a further time."""
    wait_until(
        lambda: sum("HTTP processes serve" in line for line in server.log) == times,
        what="not ready",
    )


def parts_of(server: RunningServer) -> tuple[int, list[int]]:
    """Process ids: the engine's, and the HTTP processes'."""
    found: dict[str, list[int]] = {"child": [], "process": []}
    for pid in children_of(server.process.pid):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue  # it has just ended
        if "-m" in words:
            found.setdefault(words[words.index("-m") + 1].rpartition(".")[2], []).append(pid)
    [engine] = found["child"]
    return engine, found["process"]


@contextmanager
def only(taking: int, processes: list[int]) -> Iterator[None]:
    """Which process takes a connection is the kernel's choice, and may always be the same one; here
    the others are stopped, and what comes is one's."""
    others = [pid for pid in processes if pid != taking]
    try:
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: all(map(stopped, others)))
        yield
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
