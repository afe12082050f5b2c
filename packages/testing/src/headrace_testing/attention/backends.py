"""Conformance suite of attention backends, and the float64 definition that it compares with.

A backend's tests are one class::

    class TestMine(AttentionBackendConformance):
        backend_class = MyBackend

What the backend refuses is not tested, what it does not refuse must be right. The ops it gets are
the plain-torch reference; override the ``ops`` fixture for others.

Letters: T new tokens, B requests, L keys of a request, Hq query heads, Hk kv heads, D head size,
N blocks, S block size, W window.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

from headrace_core.attention import (
    ALIBI,
    ALIBI_SQRT,
    CHUNKS,
    FEATURE_TEXTS,
    KV_PREFIX,
    SINKS,
    SLIDING_WINDOW,
    SOFT_CAP,
    AttentionBackend,
    AttentionLayerSpec,
    AttentionNeed,
)
from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.kv import NULL_BLOCK, PAD_SLOT, FullAttentionSpec
from headrace_core.ops import KernelNeed, OpTable, bind_ops

TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}
"""Absolute and relative, against float64 (ATTN-REF)."""

DTYPES = tuple(TOLERANCES)


class DenseResult(NamedTuple):
    """Attention of one request."""

    output: Tensor
    """[q, Hq, D] float64."""
    lse: Tensor
    """[q, Hq] float64: natural log of the softmax's denominator, -inf for a row without keys."""


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    causal: bool = True,
    attention_chunk: int | None = None,
    alibi_slopes: Tensor | None = None,
    alibi_sqrt: bool = False,
    kv_prefix_key: Tensor | None = None,
    kv_prefix_value: Tensor | None = None,
) -> DenseResult:
    """ATTN-REF: the last q of L tokens attend, in float64, without paging.

    Args:
        query: [q, Hq, D]; row i stands at position ``L - q + i``.
        key, value: [L, Hk, D].
        sliding_window: W; None or <= 0 = unlimited.
        soft_cap: t; 0 = none.
        sinks: [Hq], in the denominator only.
        attention_chunk: C; a query sees keys of its own chunk.
        alibi_slopes: [Hq]; the slope times key's position less query's is added to scores;
            alibi_sqrt: less the slope times the root of the distance.
        kv_prefix_key, kv_prefix_value: [S, Hk, D], seen by all.
    """
    num_new, num_heads, _ = query.shape
    seq_len, num_kv_heads, _ = key.shape
    group = num_heads // num_kv_heads
    wide_key = key.double().repeat_interleave(group, dim=1)
    wide_value = value.double().repeat_interleave(group, dim=1)
    score = torch.einsum("qhd,khd->qhk", query.double(), wide_key) * scale
    if soft_cap > 0:
        score = soft_cap * torch.tanh(score / soft_cap)
    position, at = torch.arange(seq_len - num_new, seq_len)[:, None], torch.arange(seq_len)[None]
    distance = position - at
    if alibi_slopes is not None:
        far = distance.clamp(min=0).double().sqrt() if alibi_sqrt else distance
        score = score - alibi_slopes.double()[None, :, None] * far[:, None]
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if sliding_window is not None and sliding_window > 0:
        visible &= distance < sliding_window
    if attention_chunk is not None:
        visible &= position // attention_chunk == at // attention_chunk
    score = score.masked_fill(~visible[:, None, :], -torch.inf)
    if kv_prefix_key is not None and kv_prefix_value is not None:
        always = kv_prefix_key.double().repeat_interleave(group, dim=1)
        first = torch.einsum("qhd,khd->qhk", query.double(), always) * scale
        score = torch.cat([score, first], dim=-1)
        wide_value = torch.cat(
            [wide_value, kv_prefix_value.double().repeat_interleave(group, dim=1)]
        )
    extra = torch.full((num_new, num_heads, 1), -torch.inf, dtype=torch.float64)
    if sinks is not None:
        extra = sinks.double()[None, :, None].expand(num_new, num_heads, 1)
    lse = torch.logsumexp(torch.cat([score, extra], dim=-1), dim=-1)
    weight = torch.exp(score - lse[..., None].masked_fill(lse[..., None].isneginf(), 0.0))
    return DenseResult(torch.einsum("qhk,khd->qhd", weight, wide_value), lse)


@dataclass(frozen=True, slots=True)
class Case:
    """One batch on one layer."""

    num_new: Sequence[int]
    """By request."""
    num_computed: Sequence[int]
    """By request: tokens that the cache already holds."""
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 8
    sliding_window: int | None = None
    soft_cap: float = 0.0
    sinks: bool = False
    chunk: int | None = None
    alibi: bool = False
    alibi_sqrt: bool = False
    prefix: int = 0
    """Keys that every token sees."""
    magnitude: float = 1.0
    """Factor on query values; large ones drive scores into a soft cap."""

    @property
    def need(self) -> AttentionNeed:
        """Need that a backend must support (dtype float32 on cpu)."""
        asked = {
            SLIDING_WINDOW: self.sliding_window is not None,
            SOFT_CAP: self.soft_cap > 0,
            SINKS: self.sinks,
            CHUNKS: self.chunk is not None,
            ALIBI: self.alibi,
            ALIBI_SQRT: self.alibi_sqrt,
            KV_PREFIX: self.prefix > 0,
        }
        return AttentionNeed(
            head_dim=self.head_dim,
            dtype="float32",
            kv_cache_dtype="auto",
            block_size=self.block_size,
            features=frozenset(feature for feature, is_asked in asked.items() if is_asked),
        )


BASIC_CASES: dict[str, Case] = {
    "prefill": Case([5, 13], [0, 0]),
    "decode": Case([1, 1, 1], [0, 7, 30]),
    "mixed": Case([1, 9, 1, 3], [12, 0, 8, 20]),
    "one token": Case([1], [0]),
    "chunk ends before a block": Case([7], [8]),
    "chunk ends with a block": Case([8], [8]),
    "chunk ends after a block": Case([9], [8]),
    "context of a block less one": Case([2], [7]),
    "context of a block more one": Case([2], [9]),
    "no grouping": Case([3, 1], [5, 10], num_heads=3, num_kv_heads=3),
    "groups of 4": Case([3, 1], [5, 10], num_heads=8, num_kv_heads=2),
    "groups of 7": Case([3, 1], [5, 10], num_heads=7, num_kv_heads=1),
    "odd head size": Case([3, 1], [5, 10], head_dim=20),
    "blocks of 1": Case([3, 1], [5, 10], block_size=1),
    "blocks of 128": Case([3, 1], [5, 130], block_size=128),
    "large scores": Case([3, 1], [5, 10], magnitude=30.0),
}
OPTION_CASES: dict[str, Case] = {
    f"window {w}": Case([1, 11, 1], [20, 10, 3], sliding_window=w) for w in (1, 7, 8, 9, 100)
}
OPTION_CASES |= {
    f"chunks of {c}": Case([1, 11, 1, 9], [20, 10, 3, 0], chunk=c) for c in (1, 7, 8, 9, 100)
}
OPTION_CASES |= {
    "alibi": Case([1, 9], [12, 3], alibi=True),
    "alibi by the root": Case([1, 9], [12, 3], alibi=True, alibi_sqrt=True),
    "a prefix": Case([1, 9, 4], [12, 3, 0], prefix=5),
    "a prefix, window and sinks": Case([1, 9], [12, 3], prefix=3, sliding_window=5, sinks=True),
    "alibi, chunks": Case([1, 9], [12, 3], alibi=True, chunk=5),
    "alibi, window": Case([1, 9], [12, 3], alibi=True, sliding_window=5),
    "chunks, sinks": Case([1, 9], [12, 3], chunk=5, sinks=True),
    "soft cap": Case([1, 9], [12, 3], soft_cap=5.0),
    "soft cap on huge scores": Case([1, 9], [12, 3], soft_cap=30.0, magnitude=5000.0),
    "sinks": Case([1, 9], [12, 3], sinks=True),
    "sinks, first token": Case([1], [0], sinks=True),
    "soft cap, sinks": Case([1, 9], [12, 3], soft_cap=5.0, sinks=True),
    "window, sinks": Case([1, 9], [12, 3], sliding_window=5, sinks=True),
    "window, soft cap, sinks": Case([1, 9], [12, 3], sliding_window=5, soft_cap=5.0, sinks=True),
}


class World:
    """A filled cache, a batch and the new tokens' query, key and value for one :class:`Case`.

    Everything of the cache that holds no token is NaN: free blocks, the null block, the tail of a
    last block. Blocks wholly before a sliding window or a chunk stand in the table as the null block,
    as the cache manager leaves them.
    """

    def __init__(self, backend: AttentionBackend, case: Case, dtype: str, seed: int = 0) -> None:
        self.backend, self.case = backend, case
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._random = torch.Generator().manual_seed(seed)
        self.seq_lens = [n + c for n, c in zip(case.num_new, case.num_computed, strict=True)]
        self.layer = self._make_layer()
        self.keys = [self._normal(n, case.num_kv_heads) for n in self.seq_lens]
        self.values = [self._normal(n, case.num_kv_heads) for n in self.seq_lens]
        self.query = self._normal(sum(case.num_new), case.num_heads) * case.magnitude
        self.blocks = self._place()
        self.kv_cache = self.new_cache(sum(map(len, self.blocks)) + 3)
        self._fill()
        self.batch = self._make_batch()

    @property
    def key(self) -> Tensor:
        """[T, Hk, D] of the new tokens."""
        return torch.cat([k[-n:] for k, n in zip(self.keys, self.case.num_new, strict=True)])

    @property
    def value(self) -> Tensor:
        """[T, Hk, D] of the new tokens."""
        return torch.cat([v[-n:] for v, n in zip(self.values, self.case.num_new, strict=True)])

    @property
    def slot_mapping(self) -> Tensor:
        return self.batch.groups[0].slot_mapping

    def new_cache(self, num_blocks: int) -> Tensor:
        """A cache of NaN, stored in the backend's order, seen in logical order."""
        case = self.case
        spec = FullAttentionSpec(case.block_size, case.num_kv_heads, case.head_dim, "float32")
        shape = self.backend.cache_shape(spec, num_blocks)
        order = self.backend.cache_stride_order()
        stored = torch.full([shape[i] for i in order], torch.nan, dtype=self.dtype)
        return stored.permute([order.index(i) for i in range(len(order))])

    def run(self, **changes: Any) -> Tensor:
        """Prepare and forward; ``changes`` replace arguments of forward."""
        arguments = {
            "query": self.query,
            "key": self.key,
            "value": self.value,
            "kv_cache": self.kv_cache,
            "metadata": self.backend.prepare(self.batch, 0),
        }
        return self.backend.forward(self.layer, **(arguments | changes))

    def expected(self) -> Tensor:
        """[T, Hq, D] float64 by :func:`dense_attention`."""
        starts = self.batch.cu_seqlens_q.tolist()
        queries = [self.query[a:b] for a, b in itertools.pairwise(starts)]
        layer = self.layer
        results = [
            dense_attention(
                q,
                k,
                v,
                scale=layer.scale,
                sliding_window=layer.sliding_window,
                **layer.extras,  # type: ignore[arg-type]
            )
            for q, k, v in zip(queries, self.keys, self.values, strict=True)
        ]
        return torch.cat([result.output for result in results])

    def _normal(self, num_tokens: int, num_heads: int) -> Tensor:
        shape = (num_tokens, num_heads, self.case.head_dim)
        return torch.randn(shape, generator=self._random).to(self.dtype)

    def _make_layer(self) -> AttentionLayerSpec:
        case = self.case
        sinks = torch.randn(case.num_heads, generator=self._random).to(self.dtype)
        return AttentionLayerSpec(
            name="layers.0.attention",
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            scale=case.head_dim**-0.5,
            sliding_window=case.sliding_window,
            extras=self._make_extras(sinks),
        )

    def _make_extras(self, sinks: Tensor) -> dict[str, Tensor | float]:
        case = self.case
        extras: dict[str, Tensor | float] = {}
        if case.soft_cap:
            extras["soft_cap"] = case.soft_cap
        if case.sinks:
            extras["sinks"] = sinks
        if case.chunk is not None:
            extras["attention_chunk"] = case.chunk
        if case.alibi:
            extras["alibi_slopes"] = 0.7 ** torch.arange(1.0, case.num_heads + 1)
            extras["alibi_sqrt"] = case.alibi_sqrt
        if case.prefix:
            extras["kv_prefix_key"] = self._normal(case.prefix, case.num_kv_heads)
            extras["kv_prefix_value"] = self._normal(case.prefix, case.num_kv_heads)
        return extras

    def _place(self) -> list[list[int]]:
        """Block ids by request, shuffled, none of them the null block."""
        counts = [-(-n // self.case.block_size) for n in self.seq_lens]
        shuffled = torch.randperm(sum(counts) + 2, generator=self._random).add(1).tolist()
        rows = [[shuffled.pop() for _ in range(count)] for count in counts]
        for row, computed in zip(rows, self.case.num_computed, strict=True):
            passed = self._first_seen(computed) // self.case.block_size
            row[:passed] = [NULL_BLOCK] * passed
        return rows

    def _first_seen(self, position: int) -> int:
        """The first key that a query at a position sees."""
        window, chunk = self.case.sliding_window, self.case.chunk
        if chunk is not None:
            return position // chunk * chunk
        return max(0, position - window + 1) if window is not None and window > 0 else 0

    def slots(self, request: int, positions: range) -> Tensor:
        """[len(positions)] int64; :data:`PAD_SLOT` where the block is gone."""
        size = self.case.block_size
        ids = [self.blocks[request][p // size] for p in positions]
        return torch.tensor(
            [b * size + p % size if b else PAD_SLOT for b, p in zip(ids, positions, strict=True)],
            dtype=torch.int64,
        )

    def _fill(self) -> None:
        """Write the tokens that are already computed, through the logical view."""
        views = self.backend.views(self.kv_cache)
        for request, computed in enumerate(self.case.num_computed):
            slots = self.slots(request, range(computed))
            held = (slots >= 0).nonzero().flatten()
            block, offset = slots[held] // self.case.block_size, slots[held] % self.case.block_size
            views.key_cache[block, offset] = self.keys[request][held]
            views.value_cache[block, offset] = self.values[request][held]

    def _make_batch(self) -> ForwardBatch:
        case = self.case
        table = torch.zeros(len(self.blocks), max(map(len, self.blocks)) + 1, dtype=torch.int32)
        for row, ids in zip(table, self.blocks, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        new = [
            range(computed, seq_len)
            for computed, seq_len in zip(case.num_computed, self.seq_lens, strict=True)
        ]
        slots = torch.cat([self.slots(b, positions) for b, positions in enumerate(new)])
        running = torch.tensor([0, *case.num_new]).cumsum(0)
        return ForwardBatch(
            input_ids=torch.zeros(sum(case.num_new), dtype=torch.int64),
            positions=torch.cat([torch.tensor(positions) for positions in new]),
            cu_seqlens_q=running.int(),
            seq_lens=torch.tensor(self.seq_lens, dtype=torch.int32),
            max_seqlen_q=max(case.num_new),
            max_seqlen_k=max(self.seq_lens),
            groups=(GroupBatch(table, slots),),
        )


def assert_near(actual: Tensor, expected: Tensor, dtype: str) -> None:
    """Compare with float64 within ATTN-REF's tolerance of the dtype."""
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


class AttentionBackendConformance:
    """Inherit, set ``backend_class``; every test of the contract then runs against it."""

    backend_class: ClassVar[type[AttentionBackend]]

    @pytest.fixture
    def ops(self) -> OpTable:
        """The ops handed to the backend."""
        return bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"})

    @pytest.fixture
    def backend(self, ops: OpTable) -> AttentionBackend:
        return self.backend_class(ops)

    def _require(self, need: AttentionNeed) -> None:
        reasons = self.backend_class.refuse(need)
        if reasons:
            pytest.skip(f"{self.backend_class.name} refuses: {'; '.join(reasons)}")

    def _world(self, backend: AttentionBackend, case: Case, dtype: str = "float32") -> World:
        self._require(dataclasses.replace(case.need, dtype=dtype))
        return World(backend, case, dtype)

    # -- numbers

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("case", BASIC_CASES.values(), ids=BASIC_CASES.keys())
    def test_attends(self, backend: AttentionBackend, case: Case, dtype: str) -> None:
        world = self._world(backend, case, dtype)
        assert_near(world.run(), world.expected(), dtype)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("case", OPTION_CASES.values(), ids=OPTION_CASES.keys())
    def test_attends_with_options(self, backend: AttentionBackend, case: Case, dtype: str) -> None:
        world = self._world(backend, case, dtype)
        assert_near(world.run(), world.expected(), dtype)

    @pytest.mark.parametrize(("distance", "seen"), [(3, True), (4, False), (5, False)])
    def test_window_counts_the_query_itself(
        self, backend: AttentionBackend, distance: int, seen: bool
    ) -> None:
        case = Case([1], [20], sliding_window=4, block_size=32)
        before = self._world(backend, case)
        after = self._world(backend, case)
        block, offset = divmod(int(after.slots(0, range(20 - distance, 21))[0]), 32)
        after.backend.views(after.kv_cache).value_cache[block, offset] += 1.0
        assert (not torch.equal(before.run(), after.run())) is seen

    @pytest.mark.parametrize("window", [0, -1])
    def test_window_of_nothing_is_no_window(self, backend: AttentionBackend, window: int) -> None:
        world = self._world(backend, Case([1, 9], [30, 3]))
        plain = world.run()
        world.layer = dataclasses.replace(world.layer, sliding_window=window)
        torch.testing.assert_close(world.run(), plain, atol=0, rtol=0)

    def test_scale_is_the_layers(self, backend: AttentionBackend) -> None:
        world = self._world(backend, BASIC_CASES["mixed"])
        world.layer = dataclasses.replace(world.layer, scale=0.7)
        assert_near(world.run(), world.expected(), "float32")

    @pytest.mark.parametrize("cut", [1, 7, 8, 9, 16])
    def test_chunks_add_up(self, backend: AttentionBackend, cut: int) -> None:
        """Tokens computed in two steps, the first's keys read back from the cache."""
        whole = self._world(backend, Case([17], [0]))
        expected = whole.expected()
        rest = self._world(backend, Case([17 - cut], [cut]))
        rest.keys, rest.values, rest.query = whole.keys, whole.values, whole.query[cut:]
        rest._fill()
        assert_near(rest.run(), expected[cut:], "float32")

    def test_takes_slices_of_a_fused_projection(self, backend: AttentionBackend) -> None:
        world = self._world(backend, BASIC_CASES["mixed"])
        fused = torch.cat([world.query, world.key, world.value], dim=1)
        heads, kv_heads = world.case.num_heads, world.case.num_kv_heads
        query, key, value = (
            fused[:, :heads],
            fused[:, heads : heads + kv_heads],
            fused[:, -kv_heads:],
        )
        out = world.run(query=query, key=key, value=value)
        assert_near(out, world.expected(), "float32")

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_output_is_contiguous_and_of_the_querys_dtype(
        self, backend: AttentionBackend, dtype: str
    ) -> None:
        world = self._world(backend, BASIC_CASES["mixed"], dtype)
        query = world.query.clone()
        out = world.run()
        assert out.shape == query.shape
        assert out.dtype == query.dtype
        assert out.is_contiguous()
        assert torch.equal(world.query, query), "query must not be changed"

    # -- the cache

    def test_stride_order_is_a_permutation(self, backend: AttentionBackend) -> None:
        world = self._world(backend, BASIC_CASES["mixed"])
        order = backend.cache_stride_order()
        assert sorted(order) == list(range(world.kv_cache.dim()))
        # Entry i names the logical dimension at physical position i: permuting by it is dense.
        assert world.kv_cache.permute(order).is_contiguous()

    def test_views_show_the_logical_shape(self, backend: AttentionBackend) -> None:
        world = self._world(backend, Case([1], [20], block_size=16, head_dim=32))
        for view in backend.views(world.kv_cache):
            assert view.shape == (world.kv_cache.numel() // (2 * 16 * 2 * 32), 16, 2, 32)
            assert view.untyped_storage().data_ptr() == world.kv_cache.untyped_storage().data_ptr()
        keys, values = backend.views(world.kv_cache)
        keys.zero_()
        assert values.isnan().any(), "key and value views must not overlap"

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_writes_only_at_its_slots(self, backend: AttentionBackend, dtype: str) -> None:
        world = self._world(backend, BASIC_CASES["mixed"], dtype)
        expected_keys, expected_values = (v.clone() for v in backend.views(world.kv_cache))
        blocks = world.slot_mapping // world.case.block_size
        offsets = world.slot_mapping % world.case.block_size
        expected_keys[blocks, offsets], expected_values[blocks, offsets] = world.key, world.value
        world.run()
        keys, values = backend.views(world.kv_cache)
        torch.testing.assert_close(keys, expected_keys, atol=0, rtol=0, equal_nan=True)
        torch.testing.assert_close(values, expected_values, atol=0, rtol=0, equal_nan=True)

    def test_skips_padding_slots(self, backend: AttentionBackend) -> None:
        world = self._world(backend, Case([3, 1], [4, 9]))
        before = world.kv_cache.clone()
        slots = torch.full_like(world.slot_mapping, PAD_SLOT)
        group = dataclasses.replace(world.batch.groups[0], slot_mapping=slots)
        world.batch = dataclasses.replace(world.batch, groups=(group,))
        world.run()
        torch.testing.assert_close(world.kv_cache, before, atol=0, rtol=0, equal_nan=True)

    def test_takes_more_rows_than_slots(self, backend: AttentionBackend) -> None:
        """The slot mapping says how many tokens there are; rows past it are padding."""
        world = self._world(backend, BASIC_CASES["mixed"])
        num_tokens = world.query.shape[0]
        query, key, value = (
            torch.cat([x, torch.ones(3, *x.shape[1:])])
            for x in (world.query, world.key, world.value)
        )
        out = world.run(query=query, key=key, value=value)
        assert out.shape == query.shape
        assert_near(out[:num_tokens], world.expected(), "float32")
        held = backend.views(world.kv_cache).key_cache.isfinite().all(dim=(2, 3)).sum()
        assert held == sum(world.seq_lens), "padding rows were written"

    def test_writes_nothing_if_the_caller_has(self, backend: AttentionBackend) -> None:
        world = self._world(backend, BASIC_CASES["mixed"])
        keys, values = backend.views(world.kv_cache)
        blocks = world.slot_mapping // world.case.block_size
        offsets = world.slot_mapping % world.case.block_size
        keys[blocks, offsets], values[blocks, offsets] = world.key, world.value
        before = world.kv_cache.clone()
        assert_near(world.run(key=None, value=None), world.expected(), "float32")
        torch.testing.assert_close(world.kv_cache, before, atol=0, rtol=0, equal_nan=True)

    def test_one_group_of_several(self, backend: AttentionBackend) -> None:
        """``prepare`` reads the group that it is asked for."""
        world = self._world(backend, BASIC_CASES["mixed"])
        (group,) = world.batch.groups
        other = GroupBatch(torch.zeros_like(group.block_table), group.slot_mapping * 0 + PAD_SLOT)
        world.batch = dataclasses.replace(world.batch, groups=(other, group))
        out = world.run(metadata=backend.prepare(world.batch, 1))
        assert_near(out, world.expected(), "float32")

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_profiling_gives_zeros(self, backend: AttentionBackend, dtype: str) -> None:
        world = self._world(backend, BASIC_CASES["mixed"], dtype)
        out = world.run(kv_cache=None, metadata=None)
        assert torch.equal(out, torch.zeros_like(world.query))
        assert out.is_contiguous()

    # -- refusals

    def test_name_is_said(self) -> None:
        assert self.backend_class.name
        assert self.backend_class.name == self.backend_class.name.strip().lower()

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"dtype": "float8"}, "dtype not supported"),
            ({"kv_cache_dtype": "int3"}, "kv_cache_dtype not supported"),
            ({"block_size": 24}, "block_size not supported"),
            ({"device": "abacus"}, "device abacus not supported"),
            ({"attention_type": "sideways"}, "attention type sideways not supported"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_says_why_it_refuses(self, change: dict[str, Any], reason: str) -> None:
        """One thing is wrong, so there is one reason (ATTN-VALIDATE)."""
        base = self._served_need()
        assert self.backend_class.refuse(base) == []
        assert self.backend_class.refuse(dataclasses.replace(base, **change)) == [reason]

    @pytest.mark.parametrize("feature", [*FEATURE_TEXTS, "made up"])
    def test_refuses_features_that_it_does_not_support(self, feature: str) -> None:
        base = self._served_need()
        need = dataclasses.replace(base, features=base.features | {feature})
        text = FEATURE_TEXTS.get(feature, feature)
        expected = (
            [] if feature in self.backend_class.supported_features else [f"{text} not supported"]
        )
        assert self.backend_class.refuse(need) == expected

    def test_gives_all_reasons_in_order(self) -> None:
        cls = self.backend_class
        need = AttentionNeed(
            head_dim=16,
            dtype="float8",
            kv_cache_dtype="int3",
            block_size=24,
            device="abacus",
            attention_type="sideways",
            features=frozenset({*FEATURE_TEXTS, "made up", "made before"}),
        )
        texts = [text for f, text in FEATURE_TEXTS.items() if f not in cls.supported_features]
        expected = [
            *([] if self._serves_head_dim(16) else ["head_size not supported"]),
            "dtype not supported",
            "kv_cache_dtype not supported",
            "block_size not supported",
            *(f"{text} not supported" for text in [*texts, "made before", "made up"]),
            "device abacus not supported",
            "attention type sideways not supported",
        ]
        assert cls.refuse(need) == expected

    def _serves_head_dim(self, head_dim: int) -> bool:
        dims = self.backend_class.supported_head_dims
        return not dims or head_dim in dims

    def _served_need(self) -> AttentionNeed:
        """A need that the backend's own claims say it serves."""
        cls = self.backend_class
        return AttentionNeed(
            head_dim=next(iter(cls.supported_head_dims), 64),
            dtype=cls.supported_dtypes[0],
            kv_cache_dtype=cls.supported_kv_cache_dtypes[0],
            block_size=16,
            device=cls.supported_devices[0],
            attention_type=cls.supported_attention_types[0],
            features=cls.required_features,
        )
