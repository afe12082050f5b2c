from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench import metrics
from headrace.bench.metrics import Outcome
from headrace_core.errors import ConfigError


def _outcome(started: float, ttft: float, itls: list[float], prompt: int = 10) -> Outcome:
    return Outcome(
        started, num_prompt_tokens=prompt, num_output_tokens=len(itls) + 1, num_chunks=len(itls) + 1,
        ttft=ttft, e2el=ttft + sum(itls), itls=itls,
    )  # fmt: skip


def test_report_of_two_requests():
    one, two = _outcome(0.0, 0.1, [0.02, 0.04]), _outcome(0.5, 0.3, [0.1])
    failed = Outcome(0.6, error="HTTP 500")
    report = metrics.report(
        [one, two, failed], [0.16, 0.9, 0.7], 2.0,
        measures=["ttft", "tpot", "itl", "e2el"], percentiles=[50, 99], limits={"ttft": 200, "tpot": 50},
    )  # fmt: skip
    assert (report["completed"], report["failed"]) == (2, 1)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (20, 5)
    assert report["output_throughput"] == pytest.approx(2.5)
    assert report["request_throughput"] == pytest.approx(1.0)
    assert report["request_goodput"] == pytest.approx(0.5)  # the second's first token came too late
    assert report["max_concurrent_requests"] == 2  # the second and the one that failed
    assert report["mean_ttft_ms"] == pytest.approx(200)
    assert report["mean_tpot_ms"] == pytest.approx((30 + 100) / 2)  # by request
    assert report["median_itl_ms"] == pytest.approx(40)  # all gaps pooled
    assert report["p99_e2el_ms"] == pytest.approx(160 + 0.99 * 240)


def test_one_token_has_no_time_per_token():
    assert _outcome(0.0, 0.1, []).tpot is None


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=50))
def test_percentiles_are_those_of_the_standard_library(values):
    ordered = sorted(values)
    cuts = statistics.quantiles(ordered, n=100, method="inclusive")
    for percent in (1, 50, 99):
        assert metrics.percentile(ordered, percent) == pytest.approx(cuts[percent - 1])


def test_percentiles_outside_are_refused():
    with pytest.raises(ConfigError, match="101"):
        metrics.percentile([1.0], 101)


def test_requests_that_follow_each_other_are_not_concurrent():
    outcomes = [_outcome(0.0, 0.1, []), _outcome(0.1, 0.1, []), _outcome(0.15, 0.1, [])]
    assert metrics.peak_concurrency(outcomes, [0.1, 0.2, 0.3]) == 2


def test_nothing_served_is_all_zero():
    report = metrics.report([], [], 0.0, measures=["ttft"], percentiles=[99])
    assert report["mean_ttft_ms"] == report["output_throughput"] == 0.0
