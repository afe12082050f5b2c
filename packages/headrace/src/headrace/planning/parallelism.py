"""How the engine divides a model: the one place where a plan knows it.

What it refuses is asked of the engine's own checks, so a plan never promises what a start refuses.
"""

from __future__ import annotations

import dataclasses
import os
from itertools import accumulate
from typing import TYPE_CHECKING

from headrace.assembly.engines import check_engines
from headrace.assembly.parallel.experts import check_experts
from headrace.assembly.parallel.ranks import check_ranks
from headrace.assembly.resolved import ResolvedConfig
from headrace.planning.layouts import Layout
from headrace_core.errors import ConfigError, HeadraceError, UnsupportedModel
from headrace_engine.config import EngineConfig

if TYPE_CHECKING:
    from headrace_models.layer_parts import ModelParts

STREAMS_BETWEEN_STAGES = 2
"""Tensors [T, H] that a stage hands on: blocks keep the stream in two terms (``layers.decoder.Block``). The
last stage hands them to the first, which has all that is not a layer: table, final norm and head."""


def steps_beside(config: EngineConfig, layout: Layout) -> int:
    """Steps on different requests that run at once: each stage can have one, where steps overlap at all."""
    overlap = config.scheduler.async_scheduling is not False and config.speculative.num_drafts == 0
    return layout.pipeline if overlap else 1


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
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size, 1),
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


def stage_ranges(parts: ModelParts, stages: int) -> list[range]:
    """Layers of each stage, as the engine cuts the model.

    Raises:
        UnsupportedModel: its layers cannot be on several stages; says why.
        ConfigError: there are fewer layers than stages, or ``HEADRACE_PP_LAYER_PARTITION`` is of others.
    """
    from headrace_models.stages.division import PARTITION, layers_by_stage, partition_of

    layers, field = len(parts.layers), "pipeline_parallel_size"
    if stages == 1:
        return [range(layers)]
    if parts.why_whole:
        raise UnsupportedModel(f"{field} = {stages}: the model cannot be cut: {parts.why_whole}")
    if layers < stages:
        raise ConfigError(
            f"parallel.{field} = {stages}: must be at most {layers}, the number of the model's layers",
            field=f"parallel.{field}",
        )
    wanted = os.environ.get(PARTITION)
    numbers = (
        layers_by_stage(parts.layer_costs, parts.rest_cost, stages)
        if wanted is None
        else partition_of(wanted, stages)
    )
    if sum(numbers) != layers:
        raise ConfigError(
            f"{PARTITION} = {wanted}: these are {sum(numbers)} layers, and the model has {layers}",
            field=PARTITION,
        )
    ends = [*accumulate(numbers)]
    return [range(start, end) for start, end in zip([0, *ends], ends)]
