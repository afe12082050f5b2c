"""Bytes that a rank needs, reckoned as the engine plans its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from headrace.assembly.footprint import least_activations
from headrace.assembly.resolved import ResolvedConfig
from headrace.planning.rank_model import Stage
from headrace_core.errors import CapacityError
from headrace_core.executor import MemoryProfile
from headrace_core.kv import (
    CacheSpec,
    ChunkedLocalSpec,
    CrossAttentionSpec,
    RecurrentSpec,
    SlidingWindowSpec,
)


class Workload(NamedTuple):
    """What is to run at once."""

    context: int
    """Tokens of each request, prompt and answer together."""
    concurrency: int
    """Requests, over all engines."""


class RankMemory(NamedTuple):
    """Memory of the ranks of a stage. Sizes in bytes."""

    weights: int
    cache: int
    """Of the workload's requests, at the end of their contexts."""
    activations: int
    """At least; a start measures them."""
    allowed: int
    """That the engine takes of a device at most (``gpu_memory_utilization``, ``max_memory_bytes``)."""
    cache_flag: int = 0
    """``kv_cache_memory_bytes`` to start with, where the engine would choose less than is needed; else 0."""

    @property
    def needed(self) -> int:
        return self.weights + self.cache + self.activations

    @property
    def missing(self) -> int:
        """Bytes; 0: it fits."""
        return max(0, self.needed - self.allowed)


def rank_memory(
    resolved: ResolvedConfig, stage: Stage, memory: int, requests: int, context: int
) -> RankMemory:
    """Memory of a stage's rank.

    Args:
        resolved: as one rank plans (``max_memory_bytes`` is its own).
        memory: free on its device.
        requests: that its engine runs at once.
    """
    from headrace_engine.execution.division import CacheLimits, pool_needs
    from headrace_engine.execution.memory import plan_cache
    from headrace_engine.kv.grouping import plan_groups

    settings = resolved.config.cache
    limits = dataclasses.replace(CacheLimits.of(resolved.config, context), max_num_seqs=requests)
    activations = least_activations(resolved, requests) if stage.samples else 0
    limit = settings.max_memory_bytes
    allowed = int(memory * settings.gpu_memory_utilization) if limit is None else min(limit, memory)
    if not stage.specs:
        return RankMemory(stage.weights, 0, activations, allowed)
    groups = plan_groups(stage.specs)
    needs = pool_needs(groups, limits)
    cache = sum((max(n.needed, n.held * requests) + 1) * n.block_bytes for n in needs)
    found = RankMemory(stage.weights, cache, activations, allowed)
    if found.missing:
        return found
    profile = MemoryProfile(stage.weights, activations, memory, 0.0)
    try:
        plan = plan_cache(profile, groups, settings, limits, device=resolved.platform.device)
    except CapacityError:  # sizes that the user chose are too small
        return found._replace(cache_flag=cache)
    return found._replace(cache_flag=cache) if plan.largest_batch < requests else found


def token_bytes(specs: Mapping[str, CacheSpec]) -> int:
    """Bytes of cache for each token of a request's context; of windows and chunks too, which keep some."""
    return sum(
        spec.page_bytes // spec.block_size
        for spec in specs.values()
        if not isinstance(spec, RecurrentSpec)
    )


def request_bytes(specs: Mapping[str, CacheSpec], context: int) -> int:
    """Bytes of cache that a decode step reads of a request: of windows and chunks what they keep, of
    states twice, as they are written too."""
    total = 0
    for spec in specs.values():
        if isinstance(spec, RecurrentSpec):
            total += 2 * spec.page_bytes
        else:
            total += spec.page_bytes // spec.block_size * _kept(spec, context)
    return total


def _kept(spec: CacheSpec, context: int) -> int:
    match spec:
        case SlidingWindowSpec():
            return min(context, spec.sliding_window)
        case ChunkedLocalSpec():
            return min(context, spec.attention_chunk_size)
        case CrossAttentionSpec():
            return spec.max_encoder_tokens
        case _:
            return context
