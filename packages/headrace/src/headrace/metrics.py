"""Metrics of the offline API: the objects that :meth:`headrace.LLM.get_metrics` returns.

Names, labels and meanings are those of a server's ``/metrics`` (docs/serving/metrics.md); the name of a
counter comes without Prometheus' ``_total``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace_core.errors import RequestError
from headrace_core.sampling.params import RequestOutputKind

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

    from headrace_core.engine import EngineStats
    from headrace_core.output import PoolingRequestOutput, RequestOutput
    from headrace_core.served_model import ServedModel
    from headrace_engine.input_processing.prepared import PreparedRequest
    from headrace_server.observability.metrics import Metrics, RequestTimer

PREFIX = "headrace:"
"""The beginning of every name."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A named value at the moment of the snapshot."""

    name: str
    """Begins with ``headrace:``."""
    labels: Mapping[str, str]
    """Always ``model_name`` and ``engine``; further ones distinguish metrics of one name."""


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A number that rises and falls."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Numbers that only grow, one for each position."""

    values: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """Observations, counted by size."""

    count: int
    sum: float
    buckets: Mapping[str, int]
    """Upper bound as text (``"0.5"``, last ``"+Inf"``) -> observations up to it."""


class OfflineMetrics:
    """Counts what one offline engine does (:class:`headrace_engine.offline.EngineObserver`).

    Args:
        model: its name is the label ``model_name``.

    Raises:
        ImportError: headrace-server, which defines the metrics, or prometheus-client is missing.
    """

    def __init__(self, model: ServedModel) -> None:
        from headrace_server.observability.metrics import Metrics

        self._metrics = Metrics(PREFIX, model)

    def begin(self, request: PreparedRequest) -> _Watch:
        """See :class:`headrace_engine.calls.RequestObserver`."""
        return _Watch(self._metrics, request)

    def pooled(
        self, task: str, outputs: Sequence[PoolingRequestOutput[Any]], started: float
    ) -> None:
        """See :class:`headrace_engine.offline.EngineObserver`."""
        self._metrics.pooled(task, outputs, _timer(started))

    def pooling_ended(self, reason: str) -> None:
        """See :class:`headrace_engine.offline.EngineObserver`."""
        self._metrics.unfinished(reason, 1)

    def snapshot(self, stats: EngineStats) -> list[Metric]:
        """All metrics as they are now.

        Args:
            stats: the engine's own counts, taken with ``drain=True``.
        """
        return list(_metrics(self._metrics.snapshot(stats)))


def disabled() -> RequestError:
    """The error of ``get_metrics`` where nothing was counted."""
    return RequestError(
        "get_metrics: this engine collects no statistics; make it with disable_log_stats=False",
        param="disable_log_stats",
    )


class _Watch:
    """One request that generates."""

    def __init__(self, metrics: Metrics, request: PreparedRequest) -> None:
        self._metrics = metrics
        self._params = request.params
        self._timer = metrics.timer()
        self._adds = request.params.output_kind is RequestOutputKind.DELTA
        self._num_tokens: dict[int, int] = {}
        self._reasons: dict[int, str] = {}
        self._counted = False

    def saw(self, output: RequestOutput) -> None:
        """See :class:`headrace_engine.calls.OfflineRequestWatch`."""
        before = sum(self._num_tokens.values())
        for completion in output.outputs:
            earlier = self._num_tokens.get(completion.index, 0) if self._adds else 0
            self._num_tokens[completion.index] = earlier + len(completion.token_ids)
            if completion.finish_reason is not None:
                self._reasons[completion.index] = completion.finish_reason
        if self._params.output_kind is not RequestOutputKind.FINAL_ONLY:
            self._metrics.saw_tokens(self._timer, sum(self._num_tokens.values()) - before)
        if output.finished:
            self._counted = True
            self._metrics.finished(
                output, self._params, self._timer, self._num_tokens, self._reasons
            )

    def ended(self) -> None:
        """See :class:`headrace_engine.calls.OfflineRequestWatch`."""
        if not self._counted:
            self._metrics.unfinished("abort", self._params.n)


def _timer(started: float) -> RequestTimer:
    from headrace_server.observability.metrics import RequestTimer

    return RequestTimer(min(started, time.monotonic()))


def _metrics(families: Iterable[Family]) -> Iterator[Metric]:
    """Metric families as objects of this module."""
    for family in families:
        if family.name.endswith("_per_pos"):
            yield from _vectors(family)
        elif family.type == "counter":
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    yield Counter(family.name, sample.labels, int(sample.value))
        elif family.type == "gauge":
            for sample in family.samples:
                yield Gauge(family.name, sample.labels, sample.value)
        elif family.type == "histogram":
            yield from _histograms(family)


def _vectors(family: Family) -> Iterator[Vector]:
    """A family whose samples are told apart by their position, in order of it."""
    totals = [sample for sample in family.samples if sample.name.endswith("_total")]
    if totals:
        labels = {name: v for name, v in totals[0].labels.items() if name != "position"}
        yield Vector(family.name, labels, [int(sample.value) for sample in totals])


def _histograms(family: Family) -> Iterator[Histogram]:
    """The histograms of a family, one for each set of labels."""
    counts: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        found = counts.setdefault(tuple(labels.items()), {"buckets": {}})
        kind = sample.name.removeprefix(family.name)
        if kind == "_bucket":
            found["buckets"][sample.labels["le"]] = int(sample.value)
        elif kind == "_count":
            found["count"] = int(sample.value)
        elif kind == "_sum":
            found["sum"] = sample.value
    for key, found in counts.items():
        yield Histogram(family.name, dict(key), found["count"], found["sum"], found["buckets"])
