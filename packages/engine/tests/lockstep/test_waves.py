"""Waves of passes: all engines begin and end them together, however late messages come."""

from __future__ import annotations

import random
from collections import deque

import pytest

from headrace_engine.lockstep.waves import Waves


def test_the_first_with_work_tells_the_others_once() -> None:
    told: list[int] = []
    waves = Waves(told.append)
    assert not waves.is_due
    waves.enter()
    waves.enter()
    assert (told, waves.is_due) == ([0], True)
    waves.rest()
    assert not waves.is_due
    waves.enter()
    assert told == [0, 1]


def test_who_was_told_of_a_wave_tells_nobody() -> None:
    told: list[int] = []
    waves = Waves(told.append)
    waves.begun(0)
    assert waves.is_due
    waves.enter()
    assert told == []


def test_what_was_said_of_an_ended_wave_has_no_effect() -> None:
    waves = Waves()
    waves.enter()
    waves.rest()
    waves.begun(0)
    assert not waves.is_due


def test_the_next_wave_may_begin_before_the_end_of_this_one_is_known() -> None:
    waves = Waves()
    waves.enter()
    waves.begun(1)
    waves.rest()
    assert waves.is_due


class Engine:
    """An engine by its waves only: work comes and goes, messages take any time."""

    def __init__(self) -> None:
        self.work = 0
        self.told: deque[int] = deque()
        self.waves = Waves(self.told.append)


@pytest.mark.parametrize("seed", range(30))
def test_engines_never_wait_for_one_that_rests(seed: int) -> None:
    """Passes run when all engines have entered. Whatever the order of messages and work, no engine is left in
    a pass that another one never enters, and all rest when there is no work."""
    draw = random.Random(seed)
    engines = [Engine() for _ in range(3)]
    entered: dict[int, int] = {}
    to_come = 40
    for _ in range(20_000):
        index = draw.randrange(3)
        engine = engines[index]
        match draw.randrange(3):
            case 0 if to_come and draw.random() < 0.2:
                engine.work, to_come = engine.work + draw.randrange(1, 4), to_come - 1
            case 1 if engine.told:
                number = engine.told.popleft()
                for other in engines:
                    if other is not engine:
                        other.waves.begun(number)
            case 2 if index not in entered and (engine.work or engine.waves.is_due):
                engine.waves.enter()
                entered[index] = min(1, engine.work)
        if len(entered) == 3:
            for other, rows in entered.items():
                engines[other].work -= rows
                if not any(entered.values()):
                    engines[other].waves.rest()
            entered = {}
    assert to_come == 0
    assert [engine.work for engine in engines] == [0, 0, 0]
    assert not entered
    assert not any(engine.waves.is_due for engine in engines)
    assert len({engine.waves.number for engine in engines}) == 1
