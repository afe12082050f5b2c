"""Which assumption of the model of scaling is off, where a time is far from its prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from headrace.bench.machine_numbers import Measured, ThreadNumbers
from headrace.bench.scaling_run import DecodeTimes, EngineTimes
from headrace.planning.machine import Machine, Placement, read_seconds
from headrace.planning.model_shape import ModelShape
from headrace.planning.scaling import Layout, Overhead, Prediction, ScalingRow, fits_caches

LIMIT = 0.2
"""A time that differs by more than this part of its prediction is explained."""
ENOUGH = 0.25
"""Part of a difference that a number of the machine must make up to be named as its cause."""
ASSUMPTION_OF = {
    "memory": "memory", "core reads": "memory", "link": "placement", "products": "products",
    "pieces": "pieces", "starts": "starts", "small kernels": "small", "exchange": "exchange",
    "python": "python",
}  # fmt: skip
"""What time is spent on -> the assumption behind it."""


class Cause(NamedTuple):
    """What may be behind a difference."""

    assumption: str
    seconds: float
    """That it adds to the prediction; negative: that it takes."""
    text: str


def verdicts(
    row: ScalingRow,
    times: EngineTimes,
    measured: Measured,
    shape_of: Callable[[int], ModelShape],
    overhead: Overhead,
) -> Iterator[str]:
    """A line for each time of a row that is far from its prediction."""
    alone = row.layout is Layout.ONE_PROCESS
    shape = shape_of(1 if alone else measured.machine.nodes)
    at = measured.by_threads.get(row.threads) if alone else None
    for batch, predicted in row.decode.items():
        found = times.decode[batch]
        causes = [_python(found, overhead.of(batch))]
        if at is not None:
            cached = fits_caches(shape, measured.machine, 1, batch, 0)
            causes += _machine(predicted, row.threads, at, measured.machine, shape, cached=cached)
        of = f"{batch} request{'s' if batch > 1 else ''}"
        yield from _told(row, of, found.step, predicted, causes)
    causes = []
    if at is not None:
        causes += _machine(row.prefill, row.threads, at, measured.machine, shape, cached=False)
    yield from _told(row, f"prompt of {row.prompt}", times.prefill, row.prefill, causes)


def _told(
    row: ScalingRow, of: str, seconds: float, predicted: Prediction, causes: list[Cause]
) -> Iterator[str]:
    ratio = seconds / predicted.seconds
    if abs(ratio - 1.0) <= LIMIT:
        return
    gap = seconds - predicted.seconds
    threads = f"{row.threads} thread{'s' if row.threads > 1 else ''}"
    head = f"{threads}, {row.layout.value}, {of}: {ratio:.2f} of the prediction"
    best = max(causes, key=lambda cause: cause.seconds / gap, default=None)
    if best is not None and best.seconds / gap >= ENOUGH:
        yield f"{head}; assumption '{best.assumption}' is off: {best.text}"
        return
    doubted = ASSUMPTION_OF[predicted.binds]
    yield (
        f"{head}; no number of this machine explains it. Of the prediction {predicted.binds} takes the most "
        f"({1e3 * predicted.parts[predicted.binds]:.3g} ms): doubt assumption '{doubted}' first"
    )


def _python(found: DecodeTimes, expected: float) -> Cause:
    return Cause(
        "python",
        found.python - expected,
        f"Python takes {1e3 * found.python:.2g} ms of a step here, "
        f"{1e3 * expected:.2g} with the fewest threads",
    )


def _machine(
    predicted: Prediction,
    threads: int,
    at: ThreadNumbers,
    machine: Machine,
    shape: ModelShape,
    *,
    cached: bool,
) -> Iterator[Cause]:
    """Numbers that this many threads reach, beside those that the model has from one core and one node."""
    parts, by_node = predicted.parts, machine.threads_by_node(threads)
    reading = _sum(parts, "memory", "link", "core reads")
    rate = 1.0 / read_seconds(machine, 1.0, by_node, Placement.SPREAD).seconds
    if not cached:  # what the caches give was measured with one core only
        yield Cause(
            "memory" if len(by_node) == 1 else "placement",
            reading * (rate / at.read - 1.0),
            f"{threads} threads read {at.read / 1e9:.3g} GB/s here, {rate / 1e9:.3g} by the model",
        )
    products = threads * machine.core_products
    yield Cause(
        "products",
        _sum(parts, "products", "pieces") * (products / at.products - 1.0),
        f"{threads} threads multiply {at.products / 1e9:.3g} GFLOP/s here, {products / 1e9:.3g} by the model",
    )
    meeting = machine.meeting(by_node)
    yield Cause(
        "starts",
        shape.starts * (at.meeting - meeting),
        f"a meeting of {threads} threads takes {1e6 * at.meeting:.2g} us here, "
        f"{1e6 * meeting:.2g} by the model",
    )


def _sum(parts: Mapping[str, float], *names: str) -> float:
    return sum(parts.get(name, 0.0) for name in names)
