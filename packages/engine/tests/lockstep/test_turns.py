"""When an engine that shares experts with others runs empty passes, and when it may leave."""

from __future__ import annotations

from typing import Any, cast

import pytest

from headrace_core.executor import Executor
from headrace_engine.lockstep import turns
from headrace_engine.lockstep.peers import PeerEngines
from headrace_engine.lockstep.turns import TAKE_LEAVE, LockstepTurns


class Workers:
    """Calls of an executor, and when all engines are to end."""

    def __init__(self, until: int) -> None:
        self.calls: list[str] = []
        self.failure: BaseException | None = None
        self._until = until

    def call(self, method: str) -> list[bool]:
        self.calls.append(method)
        return [len(self.calls) >= self._until]


def leaving(workers: Workers) -> LockstepTurns:
    return LockstepTurns(cast(PeerEngines, None), cast(Executor, cast(Any, workers)))


def test_it_leaves_when_all_others_do() -> None:
    workers = Workers(until=3)
    leaving(workers).leave()
    assert workers.calls == [TAKE_LEAVE] * 3


def test_it_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(turns, "LEAVE_SECONDS", -1.0)
    workers = Workers(until=100)
    leaving(workers).leave()
    assert workers.calls == [TAKE_LEAVE]
    assert "were not told to end" in caplog.text


def test_an_engine_that_has_failed_runs_no_pass() -> None:
    workers = Workers(until=1)
    workers.failure = RuntimeError("rank 1 has died")
    leaving(workers).leave()
    assert workers.calls == []
