"""What the loop does between its own steps while other engines run passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from engine_fakes import make_core
from test_loop import Sink, request

from headrace_core.errors import EngineDead
from headrace_engine.lockstep.turns import LockstepTurns
from headrace_engine.loop import EngineLoop
from headrace_testing.waiting import wait_until


class Turns:
    """So many empty passes are due."""

    def __init__(self, left: int = 0, error: BaseException | None = None) -> None:
        self.left, self.error = left, error
        self.ran = self.left_with_others = 0
        self.due: Callable[[], None] = lambda: None

    def when_due(self, call: Callable[[], None]) -> None:
        self.due = call

    def take_part(self) -> bool:
        if self.error is not None:
            raise self.error
        if not self.left:
            return False
        self.left -= 1
        self.ran += 1
        return True

    def leave(self) -> None:
        self.left_with_others += 1

    def close(self) -> None:
        self.left = 0


def looping(turns: Turns) -> tuple[EngineLoop, Sink]:
    core: Any = make_core()
    core.lockstep = cast(LockstepTurns, turns)
    sink = Sink()
    return EngineLoop(core, sink), sink


def test_empty_passes_run_while_they_are_due_and_requests_all_the_same() -> None:
    turns = Turns()
    loop, sink = looping(turns)
    loop.start()
    turns.left = 1000
    turns.due()
    wait_until(lambda: turns.ran > 3)
    turns.left = 10**9
    loop.add([request("a", 4)])
    wait_until(lambda: any(output.finish_reason for output in sink.of("a")))
    loop.stop()
    assert not loop.is_alive
    assert sink.deaths == []
    assert turns.left_with_others == 1


def test_a_failed_empty_pass_ends_the_engine() -> None:
    turns = Turns(error=EngineDead("rank 1 has died"))
    loop, sink = looping(turns)
    loop.start()
    wait_until(lambda: sink.deaths != [])
    assert "rank 1 has died" in str(sink.deaths[0])
    loop.stop()
    assert turns.left_with_others == 0, "the others end with it"


def test_the_end_of_another_engine_is_no_failure_of_one_that_was_told_to_end() -> None:
    turns = Turns()
    loop, sink = looping(turns)
    loop.start()

    def end_first() -> bool:
        loop.stop(wait=False)
        raise EngineDead("another engine has left")

    turns.take_part = end_first  # type: ignore[method-assign]
    turns.due()
    wait_until(lambda: not loop.is_alive)
    assert loop.failure is None
    assert sink.deaths == []
