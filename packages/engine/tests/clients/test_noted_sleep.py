"""What of sleep is told to a new engine."""

from __future__ import annotations

import pytest

from headrace_engine.clients.noted_sleep import NotedSleep, calls_between, noted

ASLEEP = NotedSleep((1,))
HALF = NotedSleep((1,), ("weights",))


@pytest.mark.parametrize(
    ("before", "call", "after"),
    [
        (None, ("sleep", [1]), ASLEEP),
        (None, ("wake_up", [["weights"]]), None),
        (ASLEEP, ("wake_up", [None]), None),
        (ASLEEP, ("wake_up", []), None),
        (ASLEEP, ("wake_up", [["weights"]]), HALF),
        (HALF, ("wake_up", [("weights",)]), HALF),
        (HALF, ("wake_up", [["kv_cache"]]), None),
        (ASLEEP, ("wake_up", [["kv_cache", "weights"]]), None),
        (ASLEEP, ("wake_up", ["weights"]), ASLEEP),
    ],
)
def test_after_a_call(
    before: NotedSleep | None, call: tuple[str, list[object]], after: NotedSleep | None
) -> None:
    assert noted(before, *call) == after


def test_calls_from_one_state_to_another() -> None:
    wake, sleep = ("wake_up", [None]), ("sleep", [1])
    assert calls_between(None, ASLEEP) == [sleep]
    assert calls_between(None, HALF) == [sleep, ("wake_up", [["weights"]])]
    assert calls_between(HALF, ASLEEP) == [wake, sleep]
    assert calls_between(HALF, None) == [wake]
