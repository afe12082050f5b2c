"""What the loop expects of a step."""

from __future__ import annotations

import pytest

from headrace_core.step import ScheduledStep
from headrace_engine.loop import StepPace

DECODING = ScheduledStep(1, {"a": 1, "b": 1})
PROMPT = ScheduledStep(2, {"a": 100, "b": 1})


def test_nothing_is_expected_of_an_unknown_kind() -> None:
    pace = StepPace()
    assert pace.spare(DECODING) == pace.spare(PROMPT) == 0.0
    pace.record(PROMPT, 1.01)
    assert pace.expected(DECODING) == 0.0


def test_kinds_are_judged_apart() -> None:
    pace = StepPace()
    pace.record(DECODING, 0.04)
    pace.record(PROMPT, 1.01)
    assert pace.expected(ScheduledStep(3, dict.fromkeys("abcdefgh", 1))) == 0.04
    assert pace.expected(ScheduledStep(4, {"a": 202})) == pytest.approx(2.02)


def test_a_share_of_long_steps_and_some_time_of_short_ones_is_left() -> None:
    pace = StepPace()
    pace.record(DECODING, 0.4)
    assert pace.spare(DECODING) == pytest.approx(0.3)
    pace.record(DECODING, 0.02)
    assert pace.spare(DECODING) == pytest.approx(0.01)
    pace.record(DECODING, 0.005)
    assert pace.spare(DECODING) == 0.0
