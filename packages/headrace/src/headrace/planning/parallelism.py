"""How the engine divides a model: the one place where a plan knows it.

What it refuses is asked of the engine's own checks, so a plan never promises what a start refuses.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from headrace.assembly.engines import check_engines
from headrace.assembly.ranks import check_ranks
from headrace.assembly.resolved import ResolvedConfig
from headrace.planning.layouts import Layout
from headrace.unsupported_flags import unbuilt
from headrace_core.errors import ConfigError, HeadraceError
from headrace_engine.config import EngineConfig

EXPERTS_OPTION = "enable_expert_parallel"
STREAMS_BETWEEN_STAGES = 2
"""Tensors [T, H] that a stage hands on: blocks keep the stream in two terms (``layers.decoder.Block``)."""


def with_layout(config: EngineConfig, layout: Layout) -> EngineConfig:
    """The configuration of an engine, or of several, with this layout.

    Raises:
        ConfigError: this version of the engine refuses it.
    """
    changes: dict[str, Any] = {
        "tensor_parallel_size": layout.tensor,
        "pipeline_parallel_size": layout.pipeline,
        "data_parallel_size": layout.data,
    }
    if layout.experts:
        known = {field.name for field in dataclasses.fields(config.parallel)}
        if EXPERTS_OPTION not in known:
            raise ConfigError(str(unbuilt(EXPERTS_OPTION)), field=EXPERTS_OPTION)
        changes[EXPERTS_OPTION] = True
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **changes))


def refusal(resolved: ResolvedConfig, layout: Layout) -> str:
    """Why a start with this layout is refused before the model is built; empty: it is not."""
    try:
        config = with_layout(resolved.config, layout)
        check_ranks(config, resolved.info, resolved.platform)
        if layout.data > 1:
            check_engines(config, resolved.platform)
    except HeadraceError as error:
        return str(error)
    return ""


def stage_ranges(layers: int, stages: int) -> list[range]:
    """Layers of each stage: equal shares; of what is left, one each to the stages before the last, from
    there towards the first.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    if layers < stages:
        raise ConfigError(
            f"parallel.pipeline_parallel_size = {stages}: must be at most {layers}, the model's layers",
            field="parallel.pipeline_parallel_size",
        )
    share, left = divmod(layers, stages)
    sizes = [share] * stages
    for stage in range(stages - 2, stages - 2 - left, -1):
        sizes[stage] += 1
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes)]


def experts_of_rank(num_experts: int, ranks: int) -> int:
    """Most experts that a rank keeps, where whole experts are spread."""
    return -(-num_experts // ranks)
