"""Where the time of a start goes: named phases that leave no gap."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Phase:
    """One named stretch of a start."""

    name: str
    seconds: float


@dataclass(slots=True)
class StartupTimeline:
    """Phases of a start, in order. Not thread-safe: one start, one thread.

    What no phase covers is shown as ``other``, so that a gap is seen instead of missed.
    """

    clock: Callable[[], float] = time.monotonic
    phases: list[Phase] = field(default_factory=list)
    started: float = field(init=False)
    wall: float | None = None
    """Seconds from construction to :meth:`finish`; None before."""

    def __post_init__(self) -> None:
        self.started = self.clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body as one phase; recorded also if it raises."""
        begin = self.clock()
        logger.info("start: %s ...", name)
        try:
            yield
        finally:
            self.phases.append(Phase(name, self.clock() - begin))

    def add(self, name: str, seconds: float) -> None:
        """Record a phase that was timed elsewhere (another process, say)."""
        self.phases.append(Phase(name, seconds))

    def finish(self) -> None:
        """Stop the clock. Further calls change nothing."""
        if self.wall is None:
            self.wall = self.clock() - self.started

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase; equal names are summed."""
        totals: dict[str, float] = {}
        for phase in self.phases:
            totals[phase.name] = totals.get(phase.name, 0.0) + phase.seconds
        return totals

    @property
    def accounted(self) -> float:
        """Share of the wall time that phases cover, 0..1."""
        wall = self._wall()
        return min(1.0, sum(self.seconds.values()) / wall) if wall > 0 else 1.0

    def describe(self) -> str:
        """A table: phase, seconds, share of the wall time."""
        wall = self._wall()
        rows = [*self.seconds.items()]
        other = wall - sum(seconds for _, seconds in rows)
        if other > 0.0005:
            rows.append(("other", other))
        rows.append(("total", wall))
        width = max(len(name) for name, _ in rows)
        return "\n".join(
            f"{name:<{width}}  {seconds:8.3f} s  {seconds / wall if wall else 1:6.1%}"
            for name, seconds in rows
        )

    def _wall(self) -> float:
        return self.clock() - self.started if self.wall is None else self.wall
