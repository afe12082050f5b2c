"""The time of a start: named phases that leave no gap."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Phase:
    """One named stretch of a start."""

    name: str
    seconds: float
    part_of: str | None = None
    """The phase that it is a piece of, None if it stands for itself."""


@dataclass(slots=True)
class StartupTimeline:
    """Phases of a start, in order. Not thread-safe: one start, one thread at a time.

    What no phase covers is shown as ``other``, so that a gap is seen instead of missed. A phase
    inside another one is a piece of it and shown below it.
    """

    clock: Callable[[], float] = time.monotonic
    phases: list[Phase] = field(default_factory=list)
    started: float = field(init=False)
    wall: float | None = None
    """Seconds from the beginning to :meth:`finish`, or to the end of a later phase; None before."""
    _open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @classmethod
    def of_process(cls) -> StartupTimeline:
        """A timeline that began with this process; what has passed is its phase ``start python``."""
        timeline = cls()
        age = process_age()
        if age > 0:
            timeline.started -= age
            timeline.add("start python", age)
        return timeline

    @contextmanager
    def phase(self, name: str, *, is_long: bool = False) -> Iterator[None]:
        """Time the body as one phase; recorded also if it raises.

        Args:
            is_long: it may take minutes, so that people are told when it begins.
        """
        begin = self.clock()
        part_of = self._open[0] if self._open else None
        self._open.append(name)
        logger.log(logging.INFO if is_long else logging.DEBUG, "start: %s ...", name)
        try:
            yield
        finally:
            self._open.pop()
            self.phases.append(Phase(name, self.clock() - begin, part_of))
            if self.wall is not None:
                self.wall = self.clock() - self.started

    def add(self, name: str, seconds: float, part_of: str | None = None) -> None:
        """Record a phase that was timed elsewhere (another process, say)."""
        self.phases.append(Phase(name, seconds, part_of))

    def finish(self) -> None:
        """Stop the clock. Further calls change nothing."""
        if self.wall is None:
            self.wall = self.clock() - self.started

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, without pieces of phases; equal names are summed."""
        return self._sums(None)

    @property
    def accounted(self) -> float:
        """Share of the wall time that phases cover, 0..1."""
        wall = self._wall()
        return min(1.0, sum(self.seconds.values()) / wall) if wall > 0 else 1.0

    def describe(self) -> str:
        """A table: phase, seconds, share of the wall time; pieces of a phase below it."""
        wall, rows = self._wall(), []
        for name, seconds in self.seconds.items():
            rows.append((name, seconds))
            rows.extend(("  " + piece, spent) for piece, spent in self._sums(name).items())
        other = wall - sum(self.seconds.values())
        if other > 0.0005:
            rows.append(("other", other))
        rows.append(("total", wall))
        width = max(len(name) for name, _ in rows)
        return "\n".join(
            f"{name:<{width}}  {seconds:8.3f} s  {seconds / wall if wall else 1:6.1%}"
            for name, seconds in rows
        )

    def facts(self) -> dict[str, Any]:
        """Plain data: ``seconds`` in all, the share ``accounted`` for, and ``phases`` in order, each with
        ``name``, ``seconds`` and the ``pieces`` that it consists of, as far as they were timed."""

        def shown(name: str, seconds: float) -> dict[str, Any]:
            return {"name": name, "seconds": round(seconds, 6)}

        return {
            "seconds": round(self._wall(), 6),
            "accounted": round(self.accounted, 6),
            "phases": [
                {**shown(name, seconds), "pieces": [shown(*p) for p in self._sums(name).items()]}
                for name, seconds in self.seconds.items()
            ],
        }

    def summary(self) -> str:
        """One line: the wall time, then the seconds of each phase without its pieces."""
        spent = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        return f"{self._wall():.2f} s in total: {spent}"

    def _sums(self, part_of: str | None) -> dict[str, float]:
        totals: dict[str, float] = {}
        for phase in self.phases:
            if phase.part_of == part_of:
                totals[phase.name] = totals.get(phase.name, 0.0) + phase.seconds
        return totals

    def _wall(self) -> float:
        return self.clock() - self.started if self.wall is None else self.wall


def process_age() -> float:
    """Seconds since this process began (proc(5), stat, starttime); 0.0 where that is not known."""
    try:
        # The second field is the program's name in parentheses, and may hold anything.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        begin = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - begin)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


MIDDLE_PER_FULL = 1000
"""Collections of the middle generation before a full one. A full one walks through all that requests hold,
85 ms with 11,000 of them, and finds next to nothing; the server has it while nobody waits
(:func:`collect_at_rest`). This is for one that never rests: some seven million objects later."""


def collect_at_rest() -> None:
    """Nothing is to be done: collect garbage of all generations, if the collector leaves that to us and
    there may be some."""
    if gc.get_threshold()[2] == MIDDLE_PER_FULL and gc.get_count()[2]:
        gc.collect()


@contextmanager
def collector_paused(*, freeze: bool = False) -> Iterator[None]:
    """Keep the cyclic garbage collector off while modules are imported and a model is built.

    A start makes a few hundred thousand objects that all stay; the collector would walk through
    them again and again (a tenth of the time of importing torch). Afterwards they count as old, so
    that the next short collection does not begin with all of them. Where the collector was off,
    nothing happens.

    Args:
        freeze: afterwards, keep the collector from ever looking at what exists by then
            (``gc.freeze``), and from looking at old objects while requests run
            (:data:`MIDDLE_PER_FULL`), which shortens its pauses while serving. For programs of our own:
            a caller's garbage would stay, too, and how its collector works is its own affair.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if freeze:
                gc.freeze()
                gc.set_threshold(*gc.get_threshold()[:2], MIDDLE_PER_FULL)
            else:
                _grow_old()
            gc.enable()


def _grow_old() -> None:
    """Move everything to the oldest generation, unlooked at."""
    if gc.get_freeze_count() == 0:  # else what the caller has frozen would thaw
        gc.freeze()
        gc.unfreeze()
