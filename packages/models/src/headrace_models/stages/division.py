"""How many layers each stage gets. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from headrace_core.errors import ConfigError

PARTITION = "HEADRACE_PP_LAYER_PARTITION"


def layers_by_stage(costs: Sequence[int], first: int, count: int) -> tuple[int, ...]:
    """Numbers of layers, so that the stage with the most memory has as little as possible; of equals those
    that are the most even. Each stage has one at least.

    Args:
        costs: bytes by layer.
        first: bytes of what the first stage has besides.
        count: number of stages, at most as many as layers.
    """
    sums = [0, *accumulate(costs)]
    layers = len(costs)
    # best[n]: of the first n layers over the stages so far: (the most, sum of squares, numbers).
    best = {n: _worse((0, 0, ()), first + sums[n], n) for n in range(1, layers + 1)}
    for stage in range(1, count):
        best = {
            n: min(
                _worse(best[m], sums[n] - sums[m], n - m)
                for m in range(stage, n)
            )
            for n in range(stage + 1, layers + 1)
        }  # fmt: skip
    return best[layers][2]


_Found = tuple[int, int, tuple[int, ...]]


def _worse(before: _Found, cost: int, number: int) -> _Found:
    """With one more stage of that cost."""
    most, squares, numbers = before
    return max(most, cost), squares + cost * cost, (*numbers, number)


def partition_of(text: str, count: int) -> tuple[int, ...]:
    """Read :data:`PARTITION`: numbers of layers by stage, as ``3,5``.

    Raises:
        ConfigError: it is something else, or not of ``count`` stages.
    """
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != count or min(numbers) < 1:
        raise ConfigError(
            f"{PARTITION} = {text!r:.200}: must be {count} numbers from 1 on, with commas between: the "
            f"layers of each of pipeline_parallel_size = {count} stages",
            field=PARTITION,
        )
    return numbers
