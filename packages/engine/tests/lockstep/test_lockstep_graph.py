"""Recorded steps of engines that share experts: batches are padded, and what is behind them is dropped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.graph import GraphNeed, Step, StepGraph
from headrace_engine.lockstep.graph import MOST_TOKENS, LockstepGraph, padded

BLOCK = 4
BATCH = ForwardBatch(
    input_ids=torch.tensor([5, 6, 7]),
    positions=torch.tensor([8, 0, 1]),
    cu_seqlens_q=torch.tensor([0, 1, 3], dtype=torch.int32),
    seq_lens=torch.tensor([9, 2], dtype=torch.int32),
    max_seqlen_q=2,
    max_seqlen_k=9,
    groups=(
        GroupBatch(torch.tensor([[3, 1, 4], [2, 0, 0]], dtype=torch.int32), torch.tensor([16, 8, 9])),
        GroupBatch(torch.zeros(2, 0, dtype=torch.int32), torch.zeros(0, dtype=torch.int64),
                   state_in=torch.tensor([7, -1]), state_out=torch.tensor([7, 6])),
    ),
    logits_rows=torch.tensor([0, 2]),
)  # fmt: skip


def test_a_further_request_fills_a_batch_up() -> None:
    made = padded(BATCH, 20, BLOCK)
    assert made.input_ids.tolist() == [5, 6, 7] + [0] * 17
    assert made.positions.tolist() == [8, 0, 1, *range(17)]
    assert made.cu_seqlens_q.tolist() == [0, 1, 3, 20]
    assert made.seq_lens.tolist() == [9, 2, 17]
    assert (made.max_seqlen_q, made.max_seqlen_k) == (17, 17)
    keys, states = made.groups
    assert keys.block_table.tolist() == [[3, 1, 4, 0, 0], [2, 0, 0, 0, 0], [0] * 5]
    assert keys.slot_mapping.tolist() == [16, 8, 9] + [-1] * 17
    assert states.block_table.shape == (3, 0)
    assert states.state_in is not None
    assert states.state_out is not None
    assert (states.state_in.tolist(), states.state_out.tolist()) == ([7, -1, -1], [7, 6, 0])
    assert made.logits_rows is BATCH.logits_rows
    assert padded(BATCH, 3, BLOCK) is BATCH


class Graph(StepGraph):
    """A recording that gives each row with logits, or each row, its token."""

    buckets = (64,)
    num_bytes = num_calls = 0
    sizes: tuple[int, ...] = ()

    def capture(self, step: Step, need: GraphNeed) -> None: ...
    def close(self) -> None: ...

    def fits(self, batch: ForwardBatch, num_logits: int | None = None) -> bool:
        return True

    def replay(self, batch: ForwardBatch, num_logits: int | None = None) -> Tensor:
        self.sizes = (*self.sizes, batch.num_tokens)
        return tokens(batch)[:num_logits]


class Passes:
    """All engines have recordings, of ``size`` tokens; None: one has none."""

    size: int | None = None

    def run_recorded(
        self, num_tokens: int, recorded: Callable[[int], Any], eager: Callable[[], Any]
    ) -> Any:
        return eager() if self.size is None else recorded(max(num_tokens, self.size))


def tokens(batch: ForwardBatch) -> Tensor:
    """[R, 1]: the step that is recorded."""
    rows = batch.logits_rows
    return (batch.input_ids if rows is None else batch.input_ids[rows])[:, None]


def test_replayed_or_not_it_gives_the_rows_that_are_asked_for() -> None:
    graph, passes = Graph(), Passes()
    made = LockstepGraph(graph, passes, tokens, BLOCK)
    every = dataclasses.replace(BATCH, logits_rows=None)
    asked: list[tuple[ForwardBatch, int | None]] = [
        (BATCH, None),
        (BATCH, 1),
        (BATCH, 0),
        (every, None),
    ]
    for size in (None, 2, 9):
        passes.size = size
        found = [made.replay(batch, count).flatten().tolist() for batch, count in asked]
        assert found == [[5, 7], [5], [], [5, 6, 7]]
    assert graph.sizes == (3,) * 4 + (9,) * 4


def test_large_steps_are_not_replayed() -> None:
    made = LockstepGraph(Graph(), Passes(), tokens, BLOCK)
    assert made.fits(BATCH)
    large = dataclasses.replace(BATCH, input_ids=torch.zeros(MOST_TOKENS + 1, dtype=torch.int64))
    assert not made.fits(large)
