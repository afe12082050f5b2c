"""A stage's part of steps, as each of two processes records it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headrace_attention.paged import PagedBackend
from headrace_core.batch import ForwardBatch
from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.graph import GraphNeed, StepGraph
from headrace_core.ops import KernelNeed, bind_ops
from headrace_core.parallel import Communicator
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_models.stages.stage import Link, Stage
from headrace_testing.model.decoders import PagedDriver, build_context

STEPS: Sequence[dict[str, list[int]]] = (
    {"a": [3, 4, 5, 6, 7], "b": [8, 9]}, {"a": [10], "b": [11]}, {"a": [12], "b": [13], "c": [14, 15, 16]},
)  # fmt: skip
"""Tokens by request: a prompt, decoding, and both."""
ROWS: Sequence[list[int] | None] = ([4, 6], None, [0, 1, 4])
"""Of each step, those whose hidden states are wanted."""


def eager_and_replayed(pair: Communicator, folder: str) -> tuple[list[Tensor], list[Tensor], int]:
    """Hidden states of steps that run eagerly, and of the same steps by their recordings (on the first rank;
    the second one's go there); and kernel calls of a recording."""
    info = resolve(ModelConfig(model=folder), LoadConfig(), CpuPlatform())
    ops = bind_ops(KernelNeed("cpu", info.dtype, num_threads=1))
    there, back = Link(pair, 0), Link(pair, 1)
    ways: dict[str, Any] = {"before": there} if pair.rank else {"after": there}
    stage = Stage(pair.rank, 2, result=back, **ways)
    context = build_context(info, ops=ops, backend=PagedBackend)
    part: Any = load_model(info, replace(context, stage=stage))
    with torch.inference_mode():
        driver = PagedDriver(part)
        eager = [part.forward(driver.batch(*step)) for step in zip(STEPS, ROWS)]
        driver = PagedDriver(part)
        assert ops.step_graph is not None
        graph = ops.step_graph()
        need = GraphNeed((16,), 4, 1, recorders=(pair,), all_rows=not part.ends_pass)  # type: ignore[arg-type]
        graph.capture(lambda batch: part.run_part(driver.prepared(batch)), need)
        replayed = [_replayed(part, graph, driver.batch(*step)) for step in zip(STEPS, ROWS)]
    return ([], [], graph.num_calls) if pair.rank else (eager, replayed, graph.num_calls)


def _replayed(part: Any, graph: StepGraph, batch: ForwardBatch) -> Tensor | None:
    own = batch if part.ends_pass else replace(batch, logits_rows=None)
    assert graph.fits(own)
    graph.replay(own)
    if part.ends_pass:
        return None
    rows = batch.num_tokens if batch.logits_rows is None else len(batch.logits_rows)
    states: Tensor = part.expect(rows).result(60)()
    return states
