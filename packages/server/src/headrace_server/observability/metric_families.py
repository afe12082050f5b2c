"""Metric families of several processes as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_SMALLEST = ("_created", "process_start_time_seconds")
_ONE_OF_THEM = ("process_max_fds",)


class FixedMetrics(Collector):
    """Families that are there already, in the place of a registry."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def as_data(families: Iterable[Metric]) -> list[Any]:
    """Families as plain data: name, text, type, and samples of name, labels and value."""
    return [
        [
            family.name, family.documentation, family.type,
            [[sample.name, sample.labels, sample.value] for sample in family.samples],
        ]
        for family in families
    ]  # fmt: skip


def added(own: Iterable[Metric], others: Sequence[Any]) -> list[Metric]:
    """Families of this process and those of others (:func:`as_data`), sample by sample: counts and
    gauges add up; of times of creation the earliest counts."""
    sums: dict[str, _Sum] = {}
    for whole in (as_data(own), *others):
        for name, text, kind, samples in whole:
            family = sums.setdefault(name, _Sum(name, text, kind))
            for sample_name, labels, value in samples:
                family.add(sample_name, labels, value)
    return [family.metric() for family in sums.values()]


class _Sum:
    """One family that grows."""

    def __init__(self, name: str, text: str, kind: str) -> None:
        self._head = (name, text, kind)
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        key = (name, tuple(labels.items()))
        if key in self._values:
            value = _rule(name)(self._values[key], value)
        self._values[key] = value

    def metric(self) -> Metric:
        metric = Metric(*self._head)
        for (name, labels), value in self._values.items():
            metric.add_sample(name, dict(labels), value)
        return metric


def _rule(name: str) -> Callable[[float, float], float]:
    if name.endswith(_SMALLEST):
        return min
    if name.endswith(_ONE_OF_THEM):
        return max
    return lambda a, b: a + b
