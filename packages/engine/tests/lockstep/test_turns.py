"""When an engine that shares experts with others runs empty passes, and when it may leave."""

from __future__ import annotations

from typing import Any, cast

import pytest

from headrace_core.executor import Executor
from headrace_engine.lockstep import turns
from headrace_engine.lockstep.peers import PeerEngines
from headrace_engine.lockstep.turns import TAKE_LEAVE, TAKE_PART, LockstepTurns


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


class Peers:
    """Other engines that run so many passes more, and then say their word."""

    def __init__(self, passes: int, after: int = 0) -> None:
        self.left, self.after = passes, after
        """Passes until their word, and of a wave that had begun before it."""
        self.waves = self

    @property
    def is_due(self) -> bool:
        return self.left + self.after > 0

    def say(self, word: str) -> int:
        self.word = word
        return 5

    def words(self, number: int) -> list[str] | None:
        assert number == 5
        return None if self.left else ["theirs", self.word]

    def wait_for_news(self, number: int, seconds: float) -> None:
        raise AssertionError("a pass is due")


class Passes(Workers):
    """Runs them."""

    def __init__(self, peers: Peers) -> None:
        super().__init__(until=0)
        self._peers = peers

    def call(self, method: str) -> list[bool]:
        if self._peers.left:
            self._peers.left -= 1
        else:
            self._peers.after -= 1
        return super().call(method)


def test_passes_run_until_all_have_said_their_word_and_their_wave_is_over() -> None:
    peers = Peers(passes=3, after=2)
    workers = Passes(peers)
    made = LockstepTurns(cast(PeerEngines, peers), cast(Executor, cast(Any, workers)))
    assert made._agree("mine") == ["theirs", "mine"]
    assert workers.calls == [TAKE_PART] * 5
    assert not peers.is_due


def test_who_lost_a_rank_does_not_wait_for_the_others() -> None:
    peers = Peers(passes=1)
    workers = Passes(peers)
    workers.failure = RuntimeError("rank 1 has died")
    made = LockstepTurns(cast(PeerEngines, peers), cast(Executor, cast(Any, workers)))
    with pytest.raises(RuntimeError, match="rank 1 has died"):
        made._agree("mine")
    assert workers.calls == []
