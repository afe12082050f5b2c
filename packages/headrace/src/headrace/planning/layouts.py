"""Ways to spread a model over devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Layout(NamedTuple):
    """How many engines there are, and how each divides its model. A device holds one rank."""

    tensor: int = 1
    """Ranks over which each layer is divided."""
    pipeline: int = 1
    """Stages, each with some of the layers."""
    data: int = 1
    """Engines."""
    experts: bool = False
    """True if whole experts are spread over the ranks of a stage, and of all engines; False: each expert is
    divided over the ranks of an engine."""

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def sharing_engines(self) -> int:
        """Engines that have their experts in common."""
        return self.data if self.experts else 1

    def flags(self) -> str:
        """The command line's words for it; empty for one rank."""
        sizes = (("-tp", self.tensor), ("-pp", self.pipeline), ("-dp", self.data))
        words = [f"{flag} {size}" for flag, size in sizes if size > 1]
        return " ".join([*words, *(["--enable-expert-parallel"] if self.experts else [])])

    def __str__(self) -> str:
        """Short, for a column."""
        sizes = (("tp", self.tensor), ("pp", self.pipeline), ("dp", self.data))
        words = [f"{name} {size}" for name, size in sizes if size > 1]
        return ", ".join([*words, *(["ep"] if self.experts else [])]) or "one rank"


def layouts_of(devices: int, *, has_experts: bool) -> Iterator[Layout]:
    """Every layout of all the devices that uses at most two of tensor, pipeline and data parallelism; each
    that divides layers over ranks, or has several engines, also with experts spread, where there are some."""
    for tensor in divisors(devices):
        for pipeline in divisors(devices // tensor):
            data = devices // tensor // pipeline
            if min(tensor, pipeline, data) > 1:
                continue
            yield Layout(tensor, pipeline, data)
            if has_experts and (tensor > 1 or (data > 1 and pipeline == 1)):
                yield Layout(tensor, pipeline, data, experts=True)


def divisors(number: int) -> list[int]:
    """Divisors of a number, the smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]
