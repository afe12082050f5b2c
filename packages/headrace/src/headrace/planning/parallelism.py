"""How the engine divides a model: the one place where a plan knows it.

What it refuses is asked of the engine's own checks, so a plan never promises what a start refuses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from headrace.assembly.engines import check_engines
from headrace.assembly.experts import check_experts
from headrace.assembly.ranks import check_ranks
from headrace.assembly.resolved import ResolvedConfig
from headrace.planning.layouts import Layout
from headrace_core.errors import ConfigError, HeadraceError
from headrace_engine.config import EngineConfig

STREAMS_BETWEEN_STAGES = 2
"""Tensors [T, H] that a stage hands on: blocks keep the stream in two terms (``layers.decoder.Block``). The
last stage hands them to the first, which has all that is not a layer: table, final norm and head."""
STAGES_WORK_IN_TURN = True
"""A step passes one stage after the other, and the next step waits for its tokens: stages divide memory and
not time."""


def with_layout(config: EngineConfig, layout: Layout) -> EngineConfig:
    """The configuration of an engine, or of several, with this layout.

    Raises:
        ConfigError: this version of the engine refuses it.
    """
    parallel = dataclasses.replace(
        config.parallel,
        tensor_parallel_size=layout.tensor,
        pipeline_parallel_size=layout.pipeline,
        data_parallel_size=layout.data,
        enable_expert_parallel=layout.experts,
    )
    return dataclasses.replace(config, parallel=parallel)


def check_plannable(config: EngineConfig) -> None:
    """Refuse settings of parallelism of which layouts know nothing.

    Raises:
        ConfigError: naming the setting.
    """
    parallel = config.parallel
    for name, value, default in (
        ("decode_context_parallel_size", parallel.decode_context_parallel_size, 1),
        ("enable_eplb", parallel.enable_eplb, False),
        ("nnodes", parallel.nnodes, 1),
    ):
        if value != default:
            raise ConfigError(
                f"parallel.{name} = {value!r}: must be left out: plans do not reckon with it",
                field=f"parallel.{name}",
            )


def refusal(resolved: ResolvedConfig, layout: Layout) -> str:
    """Why a start with this layout is refused before the model is built; empty: it is not."""
    try:
        config = with_layout(resolved.config, layout)
        check_ranks(config, resolved.info, resolved.platform)
        check_experts(config, resolved.info)
        if layout.data > 1:
            check_engines(config, resolved.platform)
    except HeadraceError as error:
        return str(error)
    return ""


def stage_ranges(costs: Sequence[int], first: int, stages: int) -> list[range]:
    """Layers of each stage, so that the stage with the most bytes has as few as possible; of equals those
    that are the most even.

    Args:
        costs: bytes by layer.
        first: bytes of what the first stage has besides.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    layers = len(costs)
    if layers < stages:
        raise ConfigError(
            f"parallel.pipeline_parallel_size = {stages}: must be at most {layers}, the number of the "
            "model's layers",
            field="parallel.pipeline_parallel_size",
        )
    sums = [first, *(first + total for total in accumulate(costs))]

    @cache
    def best(end: int, count: int) -> tuple[int, int, tuple[int, ...]]:
        """Of the first ``end`` layers on ``count`` stages: most bytes, sum of squares, numbers."""
        if count == 1:
            return sums[end], sums[end] ** 2, (end,)
        found = []
        for start in range(count - 1, end):
            most, squares, numbers = best(start, count - 1)
            own = sums[end] - sums[start]
            found.append((max(most, own), squares + own**2, (*numbers, end - start)))
        return min(found)

    ends = [*accumulate(best(layers, stages)[2])]
    return [range(start, end) for start, end in zip([0, *ends], ends)]
