"""A scheduler in simulated time: steps cost what a straight line says, requests come when they should."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace_core.step import ScheduledStep


class StepCost(NamedTuple):
    """Seconds of a step; about those of a model of 0.6 billion parameters on two cores."""

    step: float = 0.030
    decoding: float = 0.003
    """For each request that computes one token."""
    prompt_token: float = 0.0015

    def seconds(self, step: ScheduledStep) -> float:
        counts = step.num_scheduled_tokens.values()
        return self.step + sum(
            self.decoding if count == 1 else self.prompt_token * count for count in counts
        )


class Arrival(NamedTuple):
    """A request that comes."""

    at: float
    name: str
    prompt: int
    """Tokens; no two requests share any."""
    output: int


class PromptPart(NamedTuple):
    """Part of a prompt in a step."""

    at: float
    """Time at which the step was scheduled."""
    name: str
    num_tokens: int
    completes: bool


@dataclass
class Tails:
    """When each token came, and which parts of prompts were computed when."""

    arrivals: dict[str, Arrival]
    tokens: dict[str, list[float]] = field(default_factory=dict)
    parts: list[list[PromptPart]] = field(default_factory=list)
    """By step."""
    seconds: float = 0.0
    outputs: dict[str, list[int]] = field(default_factory=dict)

    def ttft(self, name: str) -> float:
        return self.tokens[name][0] - self.arrivals[name].at

    @property
    def ttfts(self) -> list[float]:
        return [self.ttft(name) for name in self.tokens]

    @property
    def itls(self) -> list[float]:
        return [b - a for times in self.tokens.values() for a, b in itertools.pairwise(times)]

    @property
    def throughput(self) -> float:
        """Tokens a second."""
        return sum(map(len, self.tokens.values())) / self.seconds


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that the share is not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def simulate(world: Any, arrivals: list[Arrival], cost: StepCost = StepCost()) -> Tails:  # noqa: B008
    """Serve all requests; a step is scheduled when the one before has ended, or as it ends where steps
    overlap.

    Args:
        world: see ``conftest.World``; its clock begins at 0.
    """
    tails = Tails({one.name: one for one in arrivals})
    coming = sorted(arrivals)
    left = {one.name: one.prompt for one in arrivals}
    overlaps = world.scheduler._max_steps_in_flight > 1

    def arrive(until: float) -> None:
        while coming and coming[0].at <= until:
            one = coming.pop(0)
            world.now = max(world.now, one.at)
            number = len(arrivals) - len(coming)
            world.add(one.name, [number * 10_000 + i for i in range(one.prompt)], one.output)

    def schedule() -> None:
        step = world.scheduler.schedule()
        if step is not None:
            world.in_flight.append(step)
            tails.parts.append(_parts(step, left, world.now))

    while world.scheduler.has_unfinished or coming:
        if not world.in_flight:
            if not world.scheduler.has_unfinished:
                arrive(coming[0].at)
            schedule()
        end = world.now + cost.seconds(world.in_flight[0])
        arrive(end)
        world.now = end
        if overlaps:
            schedule()
        for output in world.land():
            tails.tokens.setdefault(output.request_id, []).extend([end] * len(output.new_token_ids))
    tails.seconds = world.now
    tails.outputs = {one.name: world.tokens(one.name) for one in arrivals}
    return tails


def _parts(step: ScheduledStep, left: dict[str, int], now: float) -> list[PromptPart]:
    parts = []
    for name, count in step.num_scheduled_tokens.items():
        if left[name] > 0:
            left[name] -= count
            parts.append(PromptPart(now, name, count, left[name] == 0))
    return parts
