"""Guesses are checked where they pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_core.speculation import DraftProposer, DraftTask
from headrace_engine.execution.requests import RequestTable
from headrace_engine.speculation.depth import Acceptance, StepCosts, limit
from headrace_engine.speculation.drafter import Drafter
from headrace_testing.fakes.requests import new_request


def rates(*numbers: float) -> list[Acceptance]:
    found = [Acceptance() for _ in numbers]
    for one, number in zip(found, numbers):
        one.rate = number
    return found


def costs(seconds: dict[int, float]) -> StepCosts:
    found = StepCosts()
    for num_tokens, time in seconds.items():
        found.record(num_tokens, 0, time)
    return found


def test_nothing_is_checked_before_a_plain_step_was_measured() -> None:
    assert limit(StepCosts(), 2, [4, 4], rates(0.9, 0.9)) == [0, 0]


def test_cheap_guesses_are_all_checked() -> None:
    flat = costs(dict.fromkeys(range(1, 9), 1.0))
    assert limit(flat, 1, [5], rates(0.9)) == [5]


def test_the_cut_is_where_most_tokens_come_of_a_second() -> None:
    steep = costs({1: 1.0, 2: 1.1, 3: 1.2, 4: 3.0, 5: 3.1, 6: 3.2})
    assert limit(steep, 1, [5], rates(0.8)) == [2]


def test_what_is_computed_again_is_counted() -> None:
    """Two guesses pay alone; not if the step after a wrong one checks none."""
    steep = costs({1: 1.0, 2: 1.4, 3: 1.5})
    assert limit(steep, 1, [2], rates(0.5)) == [2]
    assert limit(steep, 1, [2], rates(0.5), again=True) == [0]
    assert limit(steep, 1, [2], rates(0.95), again=True) == [2]


def test_wrong_guesses_are_not_checked() -> None:
    steep = costs({1: 1.0, 2: 1.2, 3: 1.3})
    assert limit(steep, 1, [2], rates(0.1)) == [0]


def test_a_larger_batch_pays_for_less() -> None:
    bound = costs({4: 1.0, 8: 1.9, 12: 2.9})
    assert limit(bound, 4, [1, 1, 1, 1], rates(0.5, 0.5, 0.5, 0.5)) == [0] * 4


def test_a_plain_step_is_measured_again_at_times() -> None:
    found = costs({1: 1.0})
    for _ in range(300):
        found.record(1, 3, 1.2)
    assert not found.knows(1)
    found.record(1, 0, 1.0)
    assert found.knows(1)


def test_rates_follow_what_was_right() -> None:
    good, bad = rates(0.5, 0.5)
    for _ in range(30):
        good.record(4, 4)
        bad.record(4, 0)
    assert good.rate > 0.95
    assert bad.rate < 0.2
    assert good.expected(4) > 3.5


def test_a_request_with_wrong_guesses_rests_longer_and_longer() -> None:
    one = Acceptance()
    rests = []
    for _ in range(200):
        if one.rests():
            rests[-1] += 1
        else:
            one.record(4, 0)
            rests.append(0)
    longer = [rest for rest in rests if rest]
    assert longer[:4] == [4, 8, 16, 32]
    one.record(2, 2)
    assert one._rest == 4


class Slow(DraftProposer):
    """Counts how often it is asked."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.asked: list[list[int]] = []

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Sequence[int]]:
        self.asked.append([task.most for task in tasks])
        return [[1] * task.most for task in tasks]


def drafter(seconds: float) -> tuple[Drafter, Slow]:
    """One that knows what steps of one token, and of two to eight, take."""
    table = RequestTable([0], vocab_size=50, seed=0)
    slow = Slow({})
    made = Drafter(slow, table, adapts=True, takes_time=True)
    table.follow(made)
    table.add(new_request("a", [5, 6, 7], ([1],)))
    made.record({}, {}, 1, 0.01)
    for guesses in range(1, 8):
        made.record({"b": [1] * guesses}, {}, 1, seconds)
    return made, slow


def test_guesses_that_do_not_pay_are_not_made() -> None:
    made, slow = drafter(0.05)
    guessed = []
    for step in range(300):
        if made.drafts({"a": 4}, 1):
            guessed.append(step)
        made.record({}, {}, 1, 0.01)
    assert guessed == [126, 254]  # to see whether they pay now
    assert len(slow.asked) == 2


def test_those_that_pay_are() -> None:
    made, slow = drafter(0.011)
    assert made.drafts({"a": 4}, 1) == {"a": [1, 1, 1, 1]}
    assert slow.asked == [[4]]
