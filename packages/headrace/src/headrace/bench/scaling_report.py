"""A run of ``headrace bench scaling`` as text and as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.bench import results
from headrace.bench.machine_numbers import ThreadNumbers
from headrace.bench.scaling_run import EngineTimes
from headrace.planning.machine import Machine
from headrace.planning.scaling import ASSUMPTIONS, Overhead, Prediction, ScalingRow

_HEAD = ("threads", "layout", "of", "predicted, ms", "measured, ms", "ratio", "takes the most")


class Row(NamedTuple):
    """A number of threads in one layout: what was predicted, and what came."""

    predicted: ScalingRow
    times: EngineTimes | None = None
    """None: it was not measured."""
    verdicts: tuple[str, ...] = ()
    """Of each time that is far from its prediction."""

    def pairs(self) -> Iterator[tuple[str, Prediction, float | None]]:
        """What is timed, its prediction, and its seconds."""
        for batch, each in self.predicted.decode.items():
            found = None if self.times is None else self.times.decode[batch].step
            yield f"{batch} request{'s' if batch > 1 else ''}", each, found
        found = None if self.times is None else self.times.prefill
        yield f"prompt of {self.predicted.prompt}", self.predicted.prefill, found


def shown(model: str, machine: Machine, rows: Sequence[Row], *, measured: bool) -> str:
    """The whole report.

    Args:
        measured: there are times beside predictions.
    """
    lines = [f"Scaling: {model}", "", *machine_lines(machine), ""]
    lines.append(
        "Milliseconds from one token of each request to the next, and of a prompt."
        + ("" if measured else " PREDICTED, nothing was measured.")
    )
    lines += ["", results.grid(_HEAD, [cells for row in rows for cells in _cells(row)])]
    told = [text for row in rows for text in row.verdicts]
    if measured:
        within = "Every measured time is within 20 % of its prediction."
        lines += ["", *(told or [within])]
    lines += ["", "What the model takes for granted:"]
    lines += [f"  {name}: {text}" for name, text in ASSUMPTIONS.items()]
    return "\n".join(lines)


def machine_lines(machine: Machine) -> list[str]:
    """The machine's numbers."""
    reads = f"{_giga(machine.core_read)} GB/s of a core, {_giga(machine.node_read)} of a node"
    if machine.core_cache_read:
        reads += f"; {_giga(machine.core_cache_read)} of a core from its cache"
    few = machine.core_few_products or machine.core_products
    start, line, far_line = 1e6 * machine.start, 1e9 * machine.line, 1e9 * machine.far_line
    meetings = f"{start:.2g} us of two threads, {line:.2g} ns for each further one"
    if machine.nodes > 1:
        meetings += f", {far_line:.2g} from another node"
    lines = [
        f"nodes      {machine.nodes} of {machine.cores} core{'s' if machine.cores > 1 else ''}",
        f"reads      {reads}",
        f"products   {_giga(machine.core_products)} GFLOP/s of a core, {_giga(few)} with up to 32 rows",
        f"meetings   {meetings}",
        f"cache      {machine.cache / 2**20:.3g} MiB of a node",
    ]
    if machine.nodes > 1:
        far = machine.far_core_read or machine.core_read
        link = "no bound" if math.isinf(machine.link) else f"{_giga(machine.link)} GB/s"
        lines.append(f"far reads  {_giga(far)} GB/s of a core, {link} between nodes")
    return lines


def report_facts(
    model: str,
    machine: Machine,
    overhead: Overhead,
    rows: Sequence[Row],
    by_threads: Mapping[int, ThreadNumbers] | None = None,
) -> dict[str, Any]:
    """Plain data.

    Args:
        by_threads: what numbers of threads did, where it was measured.
    """
    return {
        "model": model,
        "machine_numbers": machine.facts(),
        "by_threads": {str(n): each._asdict() for n, each in (by_threads or {}).items()},
        "python": overhead._asdict(),
        "rows": [_row_facts(row) for row in rows],
        "assumptions": dict(ASSUMPTIONS),
    }


def _row_facts(row: Row) -> dict[str, Any]:
    ratios = {what: found / each.seconds for what, each, found in row.pairs() if found is not None}
    return {
        "predicted": row.predicted.facts(),
        "measured": None if row.times is None else row.times.facts(),
        "ratios": ratios,
        "verdicts": list(row.verdicts),
    }


def _cells(row: Row) -> Iterator[list[str]]:
    for what, each, found in row.pairs():
        ratio = "" if found is None else f"{found / each.seconds:.2f}"
        measured = "-" if found is None else _figure(1e3 * found)
        yield [str(row.predicted.threads), row.predicted.layout.value, what,
               _figure(1e3 * each.seconds), measured, ratio, each.binds]  # fmt: skip


def _figure(number: float) -> str:
    return f"{number:.0f}" if number >= 1000 else f"{number:.3g}"


def _giga(number: float) -> str:
    return f"{number / 1e9:.3g}"
