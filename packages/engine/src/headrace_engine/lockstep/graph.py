"""Recorded steps of engines that share experts: each pads its batch to the one with the most tokens.

A recording's exchanges have one size on all ranks. Engines say with their numbers of rows that they have a
recording for as many; if all that have rows do, each replays its own, of as many rows as the largest has.
Rows behind an engine's own are a request that is nobody's: it writes to no block, and its rows' results are
dropped. As results of rows do not depend on each other, they are the bits of the eager step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.graph import Step, StepGraph
from headrace_core.kv import NULL_BLOCK, PAD_SLOT
from headrace_engine.execution.graph_around import GraphAround

if TYPE_CHECKING:
    from torch import Tensor


MOST_TOKENS = 32
"""Tokens of the largest step that is replayed: of a larger one the kernels' work outweighs that of calling
them, and that of padding in other engines would, too."""


class SharedPasses(Protocol):
    """Passes of engines that share experts, on one rank."""

    def run_recorded(
        self, num_tokens: int, recorded: Callable[[int], Any], eager: Callable[[], Any]
    ) -> Any:
        """A pass of this engine: by ``recorded``, given the tokens to which it pads its batch, or by
        ``eager``."""
        ...


class LockstepGraph(GraphAround):
    """Recordings of one engine, replayed together with those of others.

    Args:
        graph: recorded with room for one request more than a step has.
        passes: of all engines.
        step: the step that was recorded.
        block_size: tokens of a block.
    """

    def __init__(self, graph: StepGraph, passes: SharedPasses, step: Step, block_size: int) -> None:
        super().__init__(graph)
        self._passes = passes
        self._step, self._block_size = step, block_size

    def fits(self, batch: ForwardBatch, num_logits: int | None = None) -> bool:
        """See :meth:`headrace_core.graph.StepGraph.fits`."""
        return batch.num_tokens <= MOST_TOKENS and self._graph.fits(batch, num_logits)

    def replay(self, batch: ForwardBatch, num_logits: int | None = None) -> Tensor:
        """See :meth:`headrace_core.graph.StepGraph.replay`; eagerly, if another engine has no recording for
        its step."""

        def recorded(num_tokens: int) -> Tensor:
            whole = padded(batch, num_tokens, self._block_size)
            found = self._graph.replay(whole, num_logits)
            return found[: batch.num_tokens] if batch.logits_rows is None else found

        def eager() -> Tensor:
            rows = batch.logits_rows
            if rows is None or num_logits is None:
                return self._step(batch)
            if num_logits:
                return self._step(dataclasses.replace(batch, logits_rows=rows[:num_logits]))
            return self._step(dataclasses.replace(batch, logits_rows=rows[:1]))[:0]

        found: Tensor = self._passes.run_recorded(batch.num_tokens, recorded, eager)
        return found


def padded(batch: ForwardBatch, num_tokens: int, block_size: int) -> ForwardBatch:
    """A batch of T tokens with ``num_tokens``, at least T: the others are those of one more request, which
    writes to no block.

    Args:
        batch: without what only some models take, as recorded steps are.
        block_size: tokens of a block.
    """
    more = num_tokens - batch.num_tokens
    if not more:
        return batch

    def longer(x: Tensor, value: int = 0, count: int = more) -> Tensor:
        return torch.cat([x, x.new_full((count,), value)])

    types = batch.token_type_ids
    return dataclasses.replace(
        batch,
        input_ids=longer(batch.input_ids),
        positions=torch.cat([batch.positions, torch.arange(more)]),
        cu_seqlens_q=longer(batch.cu_seqlens_q, num_tokens, 1),
        seq_lens=longer(batch.seq_lens, more, 1),
        max_seqlen_q=max(batch.max_seqlen_q, more),
        max_seqlen_k=max(batch.max_seqlen_k, more),
        groups=tuple(_padded(group, more, block_size) for group in batch.groups),
        token_type_ids=None if types is None else longer(types),
    )


def _padded(group: GroupBatch, more: int, block_size: int) -> GroupBatch:
    """A group with one more request of so many tokens."""
    if group.state_in is not None and group.state_out is not None:
        return dataclasses.replace(
            group,
            block_table=torch.nn.functional.pad(group.block_table, (0, 0, 0, 1)),
            state_in=torch.cat([group.state_in, group.state_in.new_full((1,), -1)]),
            state_out=torch.cat([group.state_out, group.state_out.new_full((1,), NULL_BLOCK)]),
        )
    width = max(group.block_table.shape[1], -(-more // block_size))
    table = group.block_table.new_full((group.block_table.shape[0] + 1, width), NULL_BLOCK)
    table[:-1, : group.block_table.shape[1]] = group.block_table
    slots = torch.cat([group.slot_mapping, group.slot_mapping.new_full((more,), PAD_SLOT)])
    return dataclasses.replace(group, block_table=table, slot_mapping=slots)
