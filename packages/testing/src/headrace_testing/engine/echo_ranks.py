"""Ranks without a model for tests of executors: each is an :class:`EchoWorker` in a process of its own.

What they are called with goes to a file that the test reads; how a rank fails, and when, is part of the
address at which its communicator would meet the others.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace_core.errors import WeightsError
from headrace_core.executor import MemoryProfile
from headrace_testing.engine.executors import EchoWorker

FACTORY = "headrace_testing.engine.echo_ranks:build"


class EchoMeeting(NamedTuple):
    """Tells echo ranks where to write what they are called with, and where to end.

    ``fault`` is ``kill``, ``raise`` or ``wait`` (until it is killed), a space and a method; nothing: the
    rank never fails.
    """

    calls: Path
    fault: str = ""

    def address(self, name: str) -> str:
        """Both in one text."""
        return f"{self.calls}|{self.fault}"

    def give_up(self) -> None:
        """Nobody meets here."""

    def close(self) -> None:
        """Nothing to close."""

    def lines(self, rank: int) -> list[str]:
        """What a rank has been called with so far."""
        file = self.calls.with_name(f"{self.calls.name}.{rank}")
        return file.read_text().splitlines() if file.exists() else []


class EchoRank(EchoWorker):
    """Writes down every call; fails in the one that it is told to."""

    def __init__(self, calls: Path, fault: str) -> None:
        super().__init__()
        self._file = calls
        self._how, _, self._where = fault.partition(" ")
        self._fail_in("create")

    def begin_profile(self) -> None:
        self._fail_in("begin_profile")

    def profile(self) -> MemoryProfile:
        self._note("profile")
        return MemoryProfile(weights=1, activations=2, available=3)

    def run_pass(self, method: str, args: Sequence[Any]) -> None:
        self._note(f"pass {method}({', '.join(map(str, args))})")

    def read_adapter(self, number: int, path: str, dropped: Sequence[int]) -> str:
        """A digest, which is the path; nothing lies at ``/missing``."""
        self._note(f"read_adapter({number}, {path}, {list(dropped)})")
        if path == "/missing":
            raise WeightsError(f"{path}: no such folder")
        return path

    def report(self) -> dict[str, Any]:
        super().report()
        return {"rank": 1, "pid": os.getpid()}

    def _note(self, call: str) -> None:
        with self._file.open("a") as file:
            file.write(f"{call}\n")
        self._fail_in(call.split("(")[0])

    def _fail_in(self, call: str) -> None:
        if call != self._where:
            return
        if self._how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._how == "wait":
            threading.Event().wait()
        raise LookupError(f"rank 1 fails in {call}")


def build(config: object, place: Any) -> EchoRank:
    """The worker of a rank's process."""
    [rendezvous] = place.rendezvous.values()
    calls, _, fault = rendezvous.partition("|")
    return EchoRank(Path(f"{calls}.{place.rank}"), fault)
