"""Measures of a run's requests.

The four measures mean what users of other serving benchmarks expect:

- TTFT: from sending a request to its first token;
- ITL: each gap between two tokens that follow each other, all requests pooled;
- TPOT: (E2EL - TTFT) / (output tokens - 1), one value a request with at least two tokens;
- E2EL: from sending a request to its last token.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace_core.errors import ConfigError

NAMES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (without the first)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
"""Measure -> what it is called in tables."""


@dataclass(slots=True)
class Outcome:
    """Result of one request. Times are in seconds."""

    started: float
    """After the start of the run."""
    error: str | None = None
    """None: it was served."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    """Cached tokens of the prompt, if the server reports them."""
    num_chunks: int = 0
    """Events that brought output."""
    ttft: float = 0.0
    e2el: float = 0.0
    itls: list[float] = field(default_factory=list)
    text: str = ""

    @property
    def tpot(self) -> float | None:
        """None with fewer than two tokens."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.num_output_tokens - 1)

    def measures(self, name: str) -> Sequence[float]:
        """Seconds of one measure: one value, several (``itl``) or none."""
        if name == "itl":
            return self.itls
        value: float | None = getattr(self, name)
        return () if value is None else (value,)


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """One measure over a run, in milliseconds. All zero if nothing was measured."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]


def summarize(seconds: Sequence[float], percentiles: Sequence[float]) -> MetricSummary:
    """Mean, median, standard deviation and percentiles (0..100) of times given in seconds."""
    if not seconds:
        return MetricSummary(0.0, 0.0, 0.0, dict.fromkeys(percentiles, 0.0))
    values = sorted(1e3 * value for value in seconds)
    return MetricSummary(
        statistics.fmean(values),
        percentile(values, 50),
        statistics.pstdev(values),
        {p: percentile(values, p) for p in percentiles},
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """By linear interpolation between the two nearest of the ascending values.

    Raises:
        ConfigError: ``percent`` is not within 0..100.
    """
    if not 0 <= percent <= 100:
        raise ConfigError(
            f"percentile {percent!r}: must be from 0 to 100", field="metric_percentiles"
        )
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def peak_concurrency(outcomes: Sequence[Outcome], ends: Sequence[float]) -> int:
    """Most requests that were under way at once.

    Args:
        ends: seconds after the start of the run at which each request was over.
    """
    changes = [(outcome.started, 1) for outcome in outcomes] + [(end, -1) for end in ends]
    running = most = 0
    for _, change in sorted(changes):  # at equal times ends (-1) come first
        running += change
        most = max(most, running)
    return most


def peak_output_rate(outcomes: Sequence[Outcome]) -> float:
    """Most output tokens in one second of the run (seconds counted from its start)."""
    seconds: dict[int, int] = {}
    for outcome in outcomes:
        at = outcome.started + outcome.ttft
        for gap in (0.0, *outcome.itls):
            at += gap
            seconds[int(at)] = seconds.get(int(at), 0) + 1
    return float(max(seconds.values(), default=0))


def goodput(outcomes: Sequence[Outcome], limits: Mapping[str, float], duration: float) -> float:
    """Requests a second that kept every limit.

    Args:
        limits: measure (``ttft``, ``tpot``, ``e2el``) -> most milliseconds.
        duration: of the run, in seconds.
    """

    def kept(outcome: Outcome) -> bool:
        return all(
            1e3 * value <= most for name, most in limits.items() for value in outcome.measures(name)
        )

    good = sum(outcome.error is None and kept(outcome) for outcome in outcomes)
    return good / duration if duration > 0 else 0.0


def report(
    outcomes: Sequence[Outcome],
    ends: Sequence[float],
    duration: float,
    *,
    measures: Sequence[str],
    percentiles: Sequence[float],
    limits: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The figures of a run, under the keys that tools for such result files read.

    Args:
        ends: seconds after the start at which each request was over.
        duration: of the whole run, in seconds.
        measures: of :data:`NAMES`.
        limits: for goodput; None leaves it out.
    """
    served = [outcome for outcome in outcomes if outcome.error is None]
    inputs = sum(outcome.num_prompt_tokens for outcome in served)
    outputs = sum(outcome.num_output_tokens for outcome in served)
    per_second = 1.0 / duration if duration > 0 else 0.0
    figures: dict[str, Any] = {
        "completed": len(served),
        "failed": len(outcomes) - len(served),
        "duration": duration,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_cached_tokens": sum(outcome.num_cached_tokens for outcome in served),
        "request_throughput": len(served) * per_second,
        "request_goodput": goodput(served, limits, duration) if limits else None,
        "output_throughput": outputs * per_second,
        "total_token_throughput": (inputs + outputs) * per_second,
        "max_output_tokens_per_s": peak_output_rate(served),
        "max_concurrent_requests": peak_concurrency(outcomes, ends),
    }
    for name in measures:
        summary = summarize([v for o in served for v in o.measures(name)], percentiles)
        figures[f"mean_{name}_ms"] = summary.mean
        figures[f"median_{name}_ms"] = summary.median
        figures[f"std_{name}_ms"] = summary.std
        for percent, value in summary.percentiles.items():
            figures[f"p{percent:g}_{name}_ms"] = value
    return figures
