"""Captured steps of models with recurrent layers.

A kernel provider that captures steps inherits :class:`StateStepConformance` beside
:class:`~headrace_testing.graphs.steps.StepGraphConformance`. What is proven is that a step's states are
found where its batch says, replay after replay; the ops of recurrences have suites of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.graph import GraphNeed, StepGraph
from headrace_core.ops import CapturesSteps, KernelNeed, KernelProvider
from headrace_testing.graphs.steps import (
    BLOCK_SIZE,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    NUM_BLOCKS,
    VOCAB,
    make_batch,
)
from headrace_testing.ops import bits_equal, rand

NEED = GraphNeed((4, 16), max_num_seqs=8, num_groups=3, state_groups=(0, 2))
LENGTHS: Sequence[Sequence[int]] = ([1], [9], [5, 3], [1, 1, 1, 1], [2, 7, 1, 6], [1] * 8)
WIDTH, TAPS = HEADS * HEAD_DIM, 4


class SmallHybrid:
    """A convolution over states, a layer that caches tokens, another convolution."""

    def __init__(self, ops: Mapping[str, Any], dtype: str) -> None:
        self.ops = ops
        self.embed = rand(VOCAB, WIDTH, dtype=dtype)
        self.head = ops["linear"].pack(rand(VOCAB, WIDTH, dtype=dtype))
        self.weights = rand(2, WIDTH, TAPS, dtype=dtype)
        self.caches = rand(2, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype)
        self.states = rand(2, NUM_BLOCKS, WIDTH, TAPS - 1, dtype=dtype)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        ops = self.ops
        x = ops["embedding"](batch.input_ids, self.embed)
        x = ops["add"](self._convolve(x, batch, 0), x)
        x = ops["add"](self._attend(x, batch), x)
        x = ops["add"](self._convolve(x, batch, 1), x)
        assert batch.logits_rows is not None
        logits: Tensor = ops["linear"](ops["embedding"](batch.logits_rows, x), self.head)
        return logits

    def _convolve(self, x: Tensor, batch: ForwardBatch, index: int) -> Tensor:
        where = batch.groups[NEED.state_groups[index]]
        out: Tensor = self.ops["causal_conv"](
            x, self.weights[index], None, self.states[index], where.state_in, where.state_out,
            batch.cu_seqlens_q, activation="silu",
        )  # fmt: skip
        return out

    def _attend(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        heads, where = x.view(x.shape[0], HEADS, HEAD_DIM), batch.groups[1]
        own = heads[:, :KV_HEADS]
        self.ops["cache_write"](own, own, *self.caches, where.slot_mapping)
        out: Tensor = self.ops["paged_attention"](
            heads, *self.caches, where.block_table, batch.cu_seqlens_q, batch.seq_lens,
            max_seqlen_q=batch.max_seqlen_q, max_seqlen_k=batch.max_seqlen_k,
            scale=HEAD_DIM**-0.5,
        )  # fmt: skip
        return out.flatten(1)


def hybrid_batch(lengths: Sequence[int], *, seed: int = 0) -> ForwardBatch:
    """Requests of so many new tokens, the first of which begins; states go on in place or elsewhere."""
    computed = [0 if b == 0 else 3 * b for b in range(len(lengths))]
    batch = make_batch([(n, n + c) for n, c in zip(lengths, computed)], seed=seed, num_groups=1)
    first, second = (_places(len(lengths), seed + offset) for offset in (0, 100))
    return dataclasses.replace(batch, groups=(first, *batch.groups, second))


def _places(num_seqs: int, seed: int) -> GroupBatch:
    order = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(seed)) + 1
    before, after = order[:num_seqs].clone(), order[num_seqs : 2 * num_seqs].clone()
    after[1::2] = before[1::2]
    before[0] = -1
    return GroupBatch(
        torch.zeros((num_seqs, 0), dtype=torch.int32),
        torch.zeros(0, dtype=torch.int64),
        state_in=before,
        state_out=after,
    )


class StateStepConformance:
    """Conformance suite of captured steps with recurrent layers; see the module's docstring."""

    dtypes: ClassVar[Sequence[str]] = ("float32", "bfloat16")

    @pytest.fixture
    def provider(self) -> KernelProvider:
        raise NotImplementedError("override `provider` with a fixture that returns yours")

    @pytest.fixture(params=["float32", "bfloat16"])
    def made(
        self, request: pytest.FixtureRequest, provider: KernelProvider
    ) -> tuple[SmallHybrid, StepGraph]:
        """A model and an empty graph for it."""
        if request.param not in self.dtypes:
            pytest.skip(f"{request.param} is not among this class's dtypes")
        assert isinstance(provider, CapturesSteps)
        need = KernelNeed("cpu", request.param)
        reasons = provider.refuse(need)
        if reasons:
            pytest.skip(f"{provider.name} refuses: {'; '.join(reasons)}")
        operations = provider.operations(need)
        return SmallHybrid(operations, request.param), provider.step_graph(operations)

    def test_a_step_with_states(self, made: tuple[SmallHybrid, StepGraph]) -> None:
        """The logits of the eager step, and all that it leaves, bit for bit."""
        model, graph = made
        before = model.states.clone()
        graph.capture(model, NEED)
        assert bits_equal(model.states, before), "capturing writes no state"
        for seed, lengths in enumerate(LENGTHS):
            batch = hybrid_batch(lengths, seed=seed)
            kept = (model.caches.clone(), model.states.clone())
            expected = model(batch).clone()
            left = (model.caches.clone(), model.states.clone())
            model.caches.copy_(kept[0])
            model.states.copy_(kept[1])
            assert graph.fits(batch)
            assert bits_equal(graph.replay(batch), expected)
            assert bits_equal(model.caches, left[0])
            assert bits_equal(model.states, left[1])

    def test_states_that_do_not_fit(self, made: tuple[SmallHybrid, StepGraph]) -> None:
        model, graph = made
        graph.capture(model, NEED)
        batch = hybrid_batch([1, 1, 1])
        assert graph.fits(batch)
        first, own, second = batch.groups
        assert first.state_in is not None
        for changed in (
            dataclasses.replace(first, state_in=None),
            dataclasses.replace(first, state_out=None),
            dataclasses.replace(first, state_in=first.state_in.int()),
            dataclasses.replace(first, state_in=first.state_in[1:]),
            own,
        ):
            groups = (changed, own, second)
            assert not graph.fits(dataclasses.replace(batch, groups=groups))
        assert not graph.fits(dataclasses.replace(batch, groups=(first, first, second)))
