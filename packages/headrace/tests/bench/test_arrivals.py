from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.arrivals import RampUp, send_times
from headrace_core.errors import ConfigError


@given(st.integers(1, 200), st.floats(0.1, 100), st.floats(0.1, 10), st.integers(0, 9))
def test_times_ascend_and_keep_the_rate(count, rate, burstiness, seed):
    times = send_times(count, request_rate=rate, burstiness=burstiness, seed=seed)
    assert len(times) == count
    assert times == sorted(times)
    assert times[-1] == pytest.approx(count / rate)


def test_infinite_rate_sends_all_at_once():
    assert send_times(3) == [0.0, 0.0, 0.0]


def test_burstiness_is_the_spread_of_the_gaps():
    def spread(burstiness: float) -> float:
        times = send_times(4000, request_rate=1.0, burstiness=burstiness, seed=1)
        gaps = [b - a for a, b in zip([0.0, *times], times)]
        return statistics.pstdev(gaps) / statistics.fmean(gaps)

    assert spread(1.0) == pytest.approx(1.0, rel=0.1)  # Poisson
    assert spread(0.25) == pytest.approx(2.0, rel=0.15)
    assert spread(100.0) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_speeds_up(strategy):
    times = send_times(400, ramp_up=RampUp(strategy, 1.0, 20.0), seed=2)
    quarter = len(times) // 4
    assert times[quarter] > 3 * (times[-1] - times[-quarter])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: send_times(1, request_rate=0.0), "request rate 0.0"),
        (lambda: send_times(1, request_rate=1.0, burstiness=-1.0), "burstiness -1.0"),
        (lambda: RampUp("exponential", 0.0, 2.0), "above 0"),
        (lambda: RampUp("linear", 3.0, 2.0), "above it"),
        (lambda: RampUp("steep", 1.0, 2.0), "'steep'"),
    ],
)
def test_wrong_loads_are_named(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
