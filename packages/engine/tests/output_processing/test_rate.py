"""The estimate of when a place in the queue is free."""

from __future__ import annotations

import pytest

from headrace_engine.output_processing.output_processor import PAUSE, UNKNOWN, StartRate


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.req("REL-07")
@pytest.mark.parametrize("interval", [0.01, 0.5, 4.0])
def test_the_estimate_is_the_truth_of_a_steady_queue(interval: float) -> None:
    clock = Clock()
    rate = StartRate(clock)
    assert rate.seconds_until(num_starts=5) == UNKNOWN
    for _ in range(100):
        clock.now += interval
        rate.record(1, 30)
    assert rate.seconds_until(num_starts=10) == pytest.approx(10 * interval)
    assert rate.seconds_until(num_tokens=300) == pytest.approx(10 * interval)
    assert rate.seconds_until(num_starts=1, num_tokens=300) == pytest.approx(10 * interval)


def test_a_queue_that_stopped_looks_slow_and_a_pause_is_forgotten() -> None:
    clock = Clock()
    rate = StartRate(clock)
    for _ in range(10):
        clock.now += 1.0
        rate.record(1, 1)
    clock.now += 9.0
    assert rate.seconds_until(num_starts=1) == pytest.approx(2.0)
    clock.now += PAUSE
    for _ in range(11):
        rate.record(1, 1)
        clock.now += 0.1
    assert rate.seconds_until(num_starts=1) == pytest.approx(0.11)
