"""Rounds of words: all engines hear the same, however late words come."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest

from headrace_engine.lockstep.agreement import Agreement


def test_a_round_is_complete_when_all_have_said_their_word() -> None:
    told: list[tuple[int, str]] = []
    agreement = Agreement(1, 2, lambda number, word: told.append((number, word)))
    assert agreement.say("mine") == 0
    assert told == [(0, "mine")]
    assert agreement.take(0) is None
    assert not agreement.is_complete(0)
    agreement.heard(0, 0, "theirs")
    assert agreement.is_complete(0)
    assert agreement.take(0) == ["theirs", "mine"]
    assert agreement.take(0) is None, "once"
    assert agreement.say("again") == 1


class Engine:
    """An engine by its words only."""

    def __init__(self, index: int, count: int) -> None:
        self.told: deque[tuple[int, str]] = deque()
        self.agreement = Agreement(index, count, lambda *word: self.told.append(word))
        self.waits_in: int | None = None
        self.found: list[Sequence[str]] = []


@pytest.mark.parametrize("seed", range(20))
def test_all_hear_the_same_rounds(seed: int) -> None:
    """One may be a round ahead of another."""
    draw, rounds = random.Random(seed), 12
    engines = [Engine(index, 3) for index in range(3)]
    for _ in range(10_000):
        index = draw.randrange(3)
        engine = engines[index]
        if draw.random() < 0.5 and engine.told:
            number, word = engine.told.popleft()
            for other in engines:
                if other is not engine:
                    other.agreement.heard(number, index, word)
        elif engine.waits_in is None and len(engine.found) < rounds:
            engine.waits_in = engine.agreement.say(f"{index} says {len(engine.found)}")
        elif engine.waits_in is not None:
            words = engine.agreement.take(engine.waits_in)
            if words is not None:
                engine.found.append(words)
                engine.waits_in = None
    expected = [[f"{index} says {number}" for index in range(3)] for number in range(rounds)]
    assert [engine.found for engine in engines] == [expected] * 3
