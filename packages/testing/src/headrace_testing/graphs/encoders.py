"""Captured steps of encoders, and of decoders that attend to one.

A kernel provider that captures steps inherits :class:`EncoderStepConformance` beside
:class:`~headrace_testing.graphs.steps.StepGraphConformance`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.graph import GraphNeed, StepGraph
from headrace_core.ops import CapturesSteps, KernelNeed, KernelProvider
from headrace_testing.graphs.steps import (
    BLOCK_SIZE,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    NUM_BLOCKS,
    VOCAB,
    make_batch,
)
from headrace_testing.ops import bits_equal, rand

LENGTHS: Sequence[Sequence[int]] = ([1], [9], [16], [5, 3], [1, 1, 1, 1], [2, 7, 1, 6])
STATES = 30
"""Most encoder states of a request."""

ROWS = GraphNeed((4, 16), max_num_seqs=8, num_groups=0, token_types=True)
ALL_ROWS = dataclasses.replace(ROWS, all_rows=True)
CROSS = GraphNeed((4, 16), max_num_seqs=8, num_groups=2, cross_groups=(1,))


class SmallEncoder:
    """Two post-norm layers over three embeddings -> [T, H], or the rows that are asked for."""

    def __init__(self, ops: Mapping[str, Any], dtype: str) -> None:
        self.ops = ops
        size = HEADS * HEAD_DIM
        self.tables = [rand(rows, HIDDEN, dtype=dtype, seed=rows) for rows in (VOCAB, 48, 2)]
        self.norm = rand(2, HIDDEN, dtype=dtype)
        self.qkv = self._linear(size + 2 * KV_HEADS * HEAD_DIM, HIDDEN, dtype)
        self.out = self._linear(HIDDEN, size, dtype)
        self.up = self._linear(48, HIDDEN, dtype)
        self.down = self._linear(HIDDEN, 48, dtype)
        self.bias = rand(HEADS, 2 * 48 - 1)

    def _linear(self, rows: int, columns: int, dtype: str) -> Any:
        return self.ops["linear"].pack(rand(rows, columns, dtype=dtype) * columns**-0.5)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        ops = self.ops
        assert batch.token_type_ids is not None
        ids = (batch.input_ids, batch.positions, batch.token_type_ids)
        words, places, types = map(ops["embedding"], ids, self.tables)
        x: Tensor = ops["layer_norm"](
            ops["add"](ops["add"](words, places), types), *self.norm, 1e-5
        )
        for _ in range(2):
            x, _ = ops["add_layer_norm"](self._attention(x, batch), x, *self.norm, 1e-5)
            inner = ops["linear"].activated(x, self.up, "gelu")
            x, _ = ops["add_layer_norm"](ops["linear"](inner, self.down), x, *self.norm, 1e-5)
        rows = batch.logits_rows
        return x if rows is None else ops["embedding"](rows, x)

    def _attention(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        heads = self.ops["linear"](x, self.qkv).view(x.shape[0], -1, HEAD_DIM)
        out = self.ops["varlen_attention"](
            *heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1),
            batch.cu_seqlens_q,
            max_seqlen=batch.max_seqlen_q,
            scale=HEAD_DIM**-0.5,
            sliding_window=6,
            distance_bias=self.bias,
        )
        projected: Tensor = self.ops["linear"](out.flatten(1), self.out)
        return projected


class SmallCrossDecoder:
    """A layer that caches its own tokens, then one that reads an encoder's states."""

    def __init__(self, ops: Mapping[str, Any], dtype: str) -> None:
        self.ops = ops
        self.embed = rand(VOCAB, HEADS * HEAD_DIM, dtype=dtype)
        self.head = ops["linear"].pack(rand(VOCAB, HEADS * HEAD_DIM, dtype=dtype))
        self.caches = rand(2, 2, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        x = self.ops["embedding"](batch.input_ids, self.embed)
        for group in range(2):
            x = self.ops["add"](self._attention(x, batch, group), x)
        assert batch.logits_rows is not None
        x = self.ops["embedding"](batch.logits_rows, x)
        logits: Tensor = self.ops["linear"](x, self.head)
        return logits

    def _attention(self, x: Tensor, batch: ForwardBatch, group: int) -> Tensor:
        heads, where = x.view(x.shape[0], HEADS, HEAD_DIM), batch.groups[group]
        keys, values = self.caches[group]
        lengths, longest = batch.seq_lens, batch.max_seqlen_k
        if where.seq_lens is not None:
            lengths, longest = where.seq_lens, where.max_seqlen_k
        else:
            own = heads[:, :KV_HEADS]
            self.ops["cache_write"](own, own, keys, values, where.slot_mapping)
        out: Tensor = self.ops["paged_attention"](
            heads, keys, values, where.block_table, batch.cu_seqlens_q, lengths,
            max_seqlen_q=batch.max_seqlen_q, max_seqlen_k=longest, scale=HEAD_DIM**-0.5,
            causal=where.seq_lens is None,
        )  # fmt: skip
        return out.flatten(1)


def encoder_batch(lengths: Sequence[int], *, all_rows: bool, seed: int = 0) -> ForwardBatch:
    """Whole sequences with segments and no cache."""
    batch = make_batch([(n, n) for n in lengths], all_rows=all_rows, seed=seed, num_groups=0)
    types = torch.arange(batch.num_tokens) % 2
    return dataclasses.replace(batch, token_type_ids=types)


def cross_batch(lengths: Sequence[int], *, seed: int = 0) -> ForwardBatch:
    """Requests of so many new tokens whose encoder states are in the cache already."""
    own = make_batch([(n, n + 3) for n in lengths], seed=seed, num_groups=1)
    states = [STATES - 7 * b for b in range(len(lengths))]
    (where,) = make_batch([(1, n) for n in states], seed=seed + 1, num_groups=1).groups
    cross = dataclasses.replace(
        where,
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        seq_lens=torch.tensor(states, dtype=torch.int32),
        max_seqlen_k=max(states),
    )
    return dataclasses.replace(own, groups=(*own.groups, cross))


class EncoderStepConformance:
    """Conformance suite of captured encoder steps; see the module's docstring."""

    dtypes: ClassVar[Sequence[str]] = ("float32", "bfloat16")

    @pytest.fixture
    def provider(self) -> KernelProvider:
        raise NotImplementedError("override `provider` with a fixture that returns yours")

    @pytest.fixture(params=["float32", "bfloat16"])
    def made(
        self, request: pytest.FixtureRequest, provider: KernelProvider
    ) -> tuple[Mapping[str, Any], str, StepGraph]:
        """Ops, their dtype, and an empty graph for them."""
        if request.param not in self.dtypes:
            pytest.skip(f"{request.param} is not among this class's dtypes")
        assert isinstance(provider, CapturesSteps)
        need = KernelNeed("cpu", request.param)
        reasons = provider.refuse(need)
        if reasons:
            pytest.skip(f"{provider.name} refuses: {'; '.join(reasons)}")
        operations = provider.operations(need)
        return operations, request.param, provider.step_graph(operations)

    @pytest.mark.parametrize("need", [ROWS, ALL_ROWS], ids=["rows", "all rows"])
    def test_an_encoders_step(
        self, made: tuple[Mapping[str, Any], str, StepGraph], need: GraphNeed
    ) -> None:
        """Token types, no cache group; a row for each sequence, or for each token."""
        operations, dtype, graph = made
        model = SmallEncoder(operations, dtype)
        graph.capture(model, need)
        for seed, lengths in enumerate(LENGTHS):
            batch = encoder_batch(lengths, all_rows=need.all_rows, seed=seed)
            assert graph.fits(batch)
            assert bits_equal(graph.replay(batch), model(batch))

    def test_encoder_batches_that_do_not_fit(
        self, made: tuple[Mapping[str, Any], str, StepGraph]
    ) -> None:
        operations, dtype, graph = made
        graph.capture(SmallEncoder(operations, dtype), ALL_ROWS)
        batch = encoder_batch([5, 3], all_rows=True)
        assert graph.fits(batch)
        assert not graph.fits(batch, 2)
        assert not graph.fits(encoder_batch([5, 3], all_rows=False))
        assert not graph.fits(encoder_batch([9, 8], all_rows=True))
        assert batch.token_type_ids is not None
        for types in (None, batch.token_type_ids.int(), batch.token_type_ids[1:]):
            assert not graph.fits(dataclasses.replace(batch, token_type_ids=types))
        assert not graph.fits(dataclasses.replace(batch, key_lens=batch.seq_lens))

    def test_a_decoders_step_that_reads_encoder_states(
        self, made: tuple[Mapping[str, Any], str, StepGraph]
    ) -> None:
        operations, dtype, graph = made
        model = SmallCrossDecoder(operations, dtype)
        graph.capture(model, CROSS)
        for seed, lengths in enumerate(LENGTHS):
            batch = cross_batch(lengths, seed=seed)
            before = model.caches.clone()
            expected, cached = model(batch).clone(), model.caches.clone()
            model.caches.copy_(before)
            assert graph.fits(batch)
            assert bits_equal(graph.replay(batch), expected)
            assert bits_equal(model.caches, cached)

    def test_steps_in_which_an_encoder_runs_do_not_fit(
        self, made: tuple[Mapping[str, Any], str, StepGraph]
    ) -> None:
        operations, dtype, graph = made
        graph.capture(SmallCrossDecoder(operations, dtype), CROSS)
        batch = cross_batch([2, 1])
        assert graph.fits(batch)
        states = torch.zeros(STATES, HIDDEN)
        assert not graph.fits(dataclasses.replace(batch, encoder_states=states))
        own, cross = batch.groups
        changed = (
            dataclasses.replace(cross, slot_mapping=torch.arange(3)),
            dataclasses.replace(cross, seq_lens=None),
            own,
        )
        for group in changed:
            assert not graph.fits(dataclasses.replace(batch, groups=(own, group)))
        assert not graph.fits(dataclasses.replace(batch, groups=(cross, cross)))
