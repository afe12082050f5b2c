"""Conformance suite of attention from a decoder to an encoder's states.

An attention backend that serves ``encoder_decoder`` inherits :class:`CrossAttentionConformance`
beside :class:`~headrace_testing.attention.backends.AttentionBackendConformance`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core.attention import AttentionBackend, AttentionLayerSpec, AttentionNeed
from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.kv import CrossAttentionSpec
from headrace_core.ops import KernelNeed, OpTable, bind_ops
from headrace_testing.attention.backends import DTYPES, assert_near, dense_attention

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 16, 8
LENGTHS = (7, 33)
"""Encoder states of the requests."""
PROMPTS = (4, 1)
"""Decoder tokens of each request's first step."""

LAYER = AttentionLayerSpec(
    "layers.0.cross", HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, attention_type="encoder_decoder"
)


class CrossWorld:
    """Requests with their encoder states, and a cache of NaN for them.

    Group 0 of every batch is the decoder's own and holds nonsense, group 1 is that of the
    cross-attention layer.
    """

    def __init__(self, backend: AttentionBackend, dtype: str) -> None:
        self.backend = backend
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._random = torch.Generator().manual_seed(0)
        self.keys = [self._normal(length, KV_HEADS) for length in LENGTHS]
        self.values = [self._normal(length, KV_HEADS) for length in LENGTHS]
        self.blocks = [[3], [1, 6, 2, 5, 4]]
        spec = CrossAttentionSpec(BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype)
        shape, order = backend.cache_shape(spec, 8), backend.cache_stride_order()
        stored = torch.full([shape[i] for i in order], torch.nan, dtype=self.dtype)
        self.kv_cache = stored.permute([order.index(i) for i in range(len(order))])

    def queries(self, counts: Sequence[int]) -> list[Tensor]:
        return [self._normal(count, HEADS) for count in counts]

    def run(self, requests: Sequence[int], queries: Sequence[Tensor], new: Sequence[int]) -> Tensor:
        """A step of these requests; the encoder runs for those in ``new``."""
        batch = self._batch(requests, [len(query) for query in queries], new)
        key = torch.cat([self.keys[b] for b in new]) if new else None
        value = torch.cat([self.values[b] for b in new]) if new else None
        metadata = self.backend.prepare(batch, 1)
        return self.backend.forward(
            LAYER, torch.cat(list(queries)), key, value, self.kv_cache, metadata
        )

    def expected(self, requests: Sequence[int], queries: Sequence[Tensor]) -> Tensor:
        results = [
            dense_attention(
                query, self.keys[b], self.values[b], scale=LAYER.scale, causal=False
            ).output
            for b, query in zip(requests, queries, strict=True)
        ]
        return torch.cat(results)

    def _normal(self, num_tokens: int, num_heads: int) -> Tensor:
        shape = (num_tokens, num_heads, HEAD_DIM)
        return torch.randn(shape, generator=self._random).to(self.dtype)

    def _batch(
        self, requests: Sequence[int], counts: Sequence[int], new: Sequence[int]
    ) -> ForwardBatch:
        tokens, size = sum(counts), BLOCK_SIZE
        slots = [
            self.blocks[b][i // size] * size + i % size for b in new for i in range(LENGTHS[b])
        ]
        table = torch.zeros(len(requests), 5, dtype=torch.int32)
        for row, b in zip(table, requests, strict=True):
            row[: len(self.blocks[b])] = torch.tensor(self.blocks[b])
        own = GroupBatch(torch.zeros_like(table), torch.full((tokens,), -1))
        lengths = [LENGTHS[b] for b in requests]
        cross = GroupBatch(
            table,
            torch.tensor(slots, dtype=torch.int64),
            torch.tensor(lengths, dtype=torch.int32),
            max(lengths),
        )
        return ForwardBatch(
            input_ids=torch.zeros(tokens, dtype=torch.int64),
            positions=torch.zeros(tokens, dtype=torch.int64),
            cu_seqlens_q=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
            seq_lens=torch.tensor(counts, dtype=torch.int32),
            max_seqlen_q=max(counts),
            max_seqlen_k=max(counts),
            groups=(own, cross),
        )


class CrossAttentionConformance:
    """Inherit, set ``backend_class``; every test of the contract then runs against it."""

    backend_class: ClassVar[type[AttentionBackend]]

    @pytest.fixture
    def ops(self) -> OpTable:
        """The ops handed to the backend."""
        return bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"})

    @pytest.fixture
    def backend(self, ops: OpTable) -> AttentionBackend:
        return self.backend_class(ops)

    @pytest.fixture(params=DTYPES)
    def world(self, backend: AttentionBackend, request: pytest.FixtureRequest) -> CrossWorld:
        need = AttentionNeed(
            HEAD_DIM, request.param, "auto", BLOCK_SIZE, attention_type="encoder_decoder"
        )
        reasons = self.backend_class.refuse(need)
        if reasons:
            pytest.skip(f"{self.backend_class.name} refuses: {'; '.join(reasons)}")
        return CrossWorld(backend, request.param)

    def check(self, world: CrossWorld, out: Tensor, expected: Tensor) -> None:
        assert out.is_contiguous()
        assert out.dtype is world.dtype
        assert_near(out, expected, str(world.dtype).removeprefix("torch."))

    def test_keys_are_written_once_and_read_in_every_step(self, world: CrossWorld) -> None:
        queries = world.queries(PROMPTS)
        self.check(world, world.run([0, 1], queries, [0, 1]), world.expected([0, 1], queries))
        written = world.kv_cache.clone()
        held = world.backend.views(world.kv_cache).key_cache.isfinite().all(dim=(2, 3)).sum()
        assert held == sum(LENGTHS), "exactly the states' slots are written"
        for _ in range(5):
            queries = world.queries((1, 1))
            self.check(world, world.run([0, 1], queries, []), world.expected([0, 1], queries))
            torch.testing.assert_close(world.kv_cache, written, atol=0, rtol=0, equal_nan=True)

    def test_a_request_may_begin_while_another_decodes(self, world: CrossWorld) -> None:
        world.run([0], world.queries(PROMPTS[:1]), [0])
        queries = world.queries((1, PROMPTS[1]))
        self.check(world, world.run([0, 1], queries, [1]), world.expected([0, 1], queries))

    def test_a_batch_equals_its_requests_alone(self, world: CrossWorld) -> None:
        queries = world.queries((3, 2))
        together = world.run([0, 1], queries, [0, 1])
        alone = [world.run([b], [query], []) for b, query in enumerate(queries)]
        self.check(world, torch.cat(alone), together.double())

    def test_profiling_gives_zeros(self, world: CrossWorld) -> None:
        query, states = world.queries((4,))[0], (world.keys[0], world.values[0])
        out = world.backend.forward(LAYER, query, *states, None, None)
        assert torch.equal(out, torch.zeros_like(query))
