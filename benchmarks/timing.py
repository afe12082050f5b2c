"""Interleaved timing of small pieces of work, shared by the ``kernels*.py`` programs.

Everything that is to be compared goes into one call of :func:`compare`: candidates take turns, so that a
slow minute of the machine hits all of them, and each figure is a median of rounds.

    timings = timing.compare({"ours": ours, "torch": theirs})
    print(timing.table([timing.Row("1x1024x3072", timings, timing.Work(bytes=6.3e6), limits)]))
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Call = Callable[[], object]

SETTLE_SECONDS = 0.02
"""Rest before a turn: OpenMP's threads spin for milliseconds after their last work, and would take a
core from the next candidate if that has threads of its own."""


class Timing(NamedTuple):
    """Seconds of one call."""

    median: float
    """Of the rounds' means."""
    best: float
    """Lowest of the rounds' means."""
    worst: float
    rounds: int
    calls: int
    """Calls in each round."""


def compare(
    calls: Mapping[str, Call], *, rounds: int = 7, min_seconds: float = 0.02, warm: int = 2
) -> dict[str, Timing]:
    """Time each candidate, taking turns.

    Args:
        calls: candidates by name; a candidate does the same work every time it is called.
        rounds: turns of each candidate.
        min_seconds: shortest turn; a candidate is called as often as that needs.
        warm: calls of each before anything is timed.
    """
    repeats = {name: _repeats(call, min_seconds, warm) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        # Every other round goes backwards: no candidate always follows the same neighbour.
        for name in list(calls) if turn % 2 == 0 else reversed(list(calls)):
            time.sleep(SETTLE_SECONDS)
            seconds[name].append(_timed(calls[name], repeats[name]))
    return {
        name: Timing(statistics.median(each), min(each), max(each), rounds, repeats[name])
        for name, each in seconds.items()
    }


def rotate(calls: Sequence[Call]) -> Call:
    """A candidate that does the next of ``calls`` each time.

    For work that meets its operands in memory, not in the caches, as a layer's weights in a decode step
    are: give as many copies as exceed the last-level cache (:func:`copies_beyond_caches`).
    """
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def copies_beyond_caches(num_bytes: int, *, total: int = 256 << 20, most: int = 64) -> int:
    """How many copies of ``num_bytes`` it takes to have ``total`` bytes, so that none stays cached."""
    return max(1, min(most, -(-total // max(1, num_bytes))))


@dataclass(frozen=True)
class Work:
    """What one call has to move and to compute at least."""

    bytes: float = 0.0
    """Read from memory."""
    flops: float = 0.0
    """Multiplications and additions, counted separately."""


@dataclass(frozen=True)
class Limits:
    """What the machine gives, measured in the same run; 0 = unknown."""

    read_bytes_s: float = 0.0
    flops_s: float = 0.0
    """In the arithmetic of the row."""

    def seconds(self, work: Work) -> float:
        """The shortest time that ``work`` can take: reads and arithmetic fully overlapped."""
        reads = work.bytes / self.read_bytes_s if self.read_bytes_s else 0.0
        return max(reads, work.flops / self.flops_s if self.flops_s else 0.0)


class Row(NamedTuple):
    """One line of a table: a case and its candidates' timings, the first candidate being ours."""

    case: str
    timings: Mapping[str, Timing]
    work: Work = Work()
    limits: Limits = Limits()

    def as_dict(self) -> dict[str, object]:
        """For a line of JSON."""
        return {
            "case": self.case,
            "timings": {name: t._asdict() for name, t in self.timings.items()},
            "limit_seconds": self.limits.seconds(self.work),
        }


def table(rows: Sequence[Row]) -> str:
    """A Markdown table: microseconds of each candidate, ratio to the best other one, share of the limit.

    All rows have the same candidates in the same order.
    """
    names = list(rows[0].timings)
    head = ["case", *(f"{name}, us" for name in names), f"{names[0]} is", "of the limit"]
    lines = [head, ["---"] * len(head), *([*_cells(row, names)] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The flags that all ``kernels*.py`` programs have: ``--quick``, ``--json FILE``, ``--only TEXT``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few rounds: does it work at all?")
    parser.add_argument("--json", metavar="FILE", help="append the rows here as JSON lines")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this")
    return parser


def save(rows: Sequence[Row], file: str | None, **context: object) -> None:
    """Append the rows to ``file`` as JSON lines, each with ``context``; None writes nothing."""
    if file is not None:
        with open(file, "a", encoding="utf-8") as out:
            out.writelines(json.dumps({**context, **row.as_dict()}) + "\n" for row in rows)


def _cells(row: Row, names: Sequence[str]) -> list[str]:
    ours = row.timings[names[0]].median
    others = [row.timings[name].median for name in names[1:]]
    shown = [f"{row.timings[name].median * 1e6:.4g}" for name in names]
    ratio = f"{min(others) / ours:.2f}x" if others else "-"
    limit = row.limits.seconds(row.work)
    return [row.case, *shown, ratio, f"{limit / ours:.0%}" if limit else "-"]


def _repeats(call: Call, min_seconds: float, warm: int) -> int:
    for _ in range(warm):
        call()
    repeats = 1
    while (seconds := _timed(call, repeats) * repeats) < min_seconds and repeats < 1 << 20:
        repeats = max(repeats + 1, min(10 * repeats, round(1.1 * repeats * min_seconds / seconds)))
    return repeats


def _timed(call: Call, repeats: int) -> float:
    """Mean seconds of ``repeats`` calls."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats
