"""Recording of a worker's steps, which each rank does for itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from headrace_core.graph import StepGraph
from headrace_core.kv import KVCacheConfig
from headrace_engine.execution.cache import cross_groups
from headrace_engine.execution.capture import Capture, capture_steps
from headrace_engine.execution.runner import ModelRunner
from headrace_engine.kv.states import state_groups
from headrace_engine.lockstep.graph import LockstepGraph
from headrace_engine.worker.settings import WorkerLimits, WorkerSettings


def step_recorder(
    settings: WorkerSettings, runner: ModelRunner, cache: KVCacheConfig, all_rows: bool
) -> Callable[..., StepGraph | None]:
    """Records steps as :func:`~headrace_engine.execution.capture.capture_steps` does, given the step first.

    Args:
        settings: whose ``capture`` is not None.
        all_rows: recorded steps give hidden states of all rows.
    """
    assert settings.capture is not None
    return partial(
        capture_steps,
        settings.capture,
        # One more, by which engines that share experts fill a batch up.
        max_num_seqs=settings.limits.max_num_seqs + meets_engines(settings.ranks.experts),
        num_groups=len(runner.backends),
        device=runner.device.type,
        all_rows=all_rows,
        token_types=settings.takes_token_types,
        cross_groups=tuple(cross_groups(cache)),
        state_groups=tuple(state_groups(cache)),
    )


def meets_engines(experts: Any) -> bool:
    """True if passes are those of several engines, which share experts.

    Args:
        experts: of :class:`~headrace_engine.worker.settings.RankSettings`.
    """
    return experts is not None and bool(experts.meets_engines)


def record_together(
    experts: Any, runner: ModelRunner, record: Callable[..., StepGraph | None]
) -> StepGraph | None:
    """Steps of this rank, recorded: to be replayed together with those of other ranks or engines.

    Args:
        experts: see :func:`meets_engines`.
        record: see :func:`step_recorder`.
    """
    if not meets_engines(experts):
        return runner.record(record)
    with experts.recording():
        graph = runner.record(record)
    if graph is None:
        return None
    return LockstepGraph(graph, experts, runner.whole_step, runner.block_size)


def captured_bytes(
    capture: Capture | None,
    limits: WorkerLimits,
    *,
    recordings: int,
    activations: int,
    logits: int,
) -> int:
    """Bytes that captured steps will hold besides: their share of the largest step's activations, and logits,
    also in the activations' dtype, of as many rows as that share samples.

    Args:
        recordings: captures of a step of each size.
        activations, logits: bytes of the largest step.
    """
    if capture is None or not capture.largest:
        return 0
    share = recordings * capture.largest / limits.max_num_batched_tokens
    rows = recordings * min(1.0, capture.largest / limits.max_num_seqs)
    return int(share * activations + 2 * rows * logits)
