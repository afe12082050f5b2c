"""Latent attention: writing its cache, attending to it, and the linear layers of
heads around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import headrace_reference as reference
from headrace_reference.cache import as_bytes, stored
from headrace_testing.ops.inputs import bits_equal, call_wide, rand
from headrace_testing.ops.paged import moved
from headrace_testing.ops.suite import OpSuite

LENGTHS = [(1, 1), (1, 70), (5, 5), (17, 90), (3, 35), (1, 16), (1, 129)]
"""(new tokens, context): decode, prefill and chunks together."""

LONG_LENGTHS = [(1, 1400), (70, 1100), (3, 1030), (1, 513), (40, 40)]


@dataclass(frozen=True)
class MLACase:
    """Inputs of one call of ``mla_attention``, in the order of its parameters."""

    query: Tensor
    rope_query: Tensor
    cache: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    scale: float
    topk_indices: Tensor | None = None
    k_scale: Tensor | None = None

    def run(self, op: Callable[..., Tensor]) -> Tensor:
        return op(*self._arguments(), **self._options())

    def expected(self) -> Tensor:
        out: Tensor = call_wide(reference.mla_attention, *self._arguments(), **self._options())
        return out

    def request(self, b: int, first: int = 0, last: int | None = None) -> MLACase:
        """Request b alone, or only its new tokens [first, last), as a chunk would bring them."""
        start, end = int(self.cu_seqlens_q[b]), int(self.cu_seqlens_q[b + 1])
        last = end - start if last is None else last
        return replace(
            self,
            query=self.query[start + first : start + last],
            rope_query=self.rope_query[start + first : start + last],
            block_table=self.block_table[b : b + 1],
            cu_seqlens_q=self.cu_seqlens_q.new_tensor([0, last - first]),
            seq_lens=self.seq_lens[b : b + 1] - (end - start - last),
            topk_indices=None
            if self.topk_indices is None
            else self.topk_indices[start + first : start + last],
        )

    def _arguments(self) -> tuple[Tensor, ...]:
        return (
            self.query,
            self.rope_query,
            self.cache,
            self.block_table,
            self.cu_seqlens_q,
            self.seq_lens,
        )

    def _options(self) -> dict[str, Any]:
        some = len(self.seq_lens) > 0
        return {
            "max_seqlen_q": int(self.cu_seqlens_q.diff().max()) if some else 0,
            "max_seqlen_k": int(self.seq_lens.max()) if some else 0,
            "scale": self.scale,
            "topk_indices": self.topk_indices,
            "k_scale": self.k_scale,
        }


def mla_case(
    lengths: Sequence[tuple[int, int]],
    *,
    dtype: str,
    device: str = "cpu",
    num_heads: int = 4,
    latent_dim: int = 40,
    rope_dim: int = 8,
    block_size: int = 16,
    padding: int = 0,
    blocks_apart: int = 1,
    seed: int = 0,
    cache_dtype: str | None = None,
    k_scale: Tensor | None = None,
) -> MLACase:
    """A batch of (new tokens, context length) requests over scattered blocks.

    Both queries are slices, and slots that no request owns are NaN. ``padding`` rows belong to no
    request. blocks_apart: the cache is every so many-th block of a larger one. cache_dtype: one of
    ``ONE_BYTE_CACHES``, filled with what is stored under ``k_scale`` [1].
    """
    width = latent_dim + rope_dim
    blocks_of = [-(-seq_len // block_size) for _, seq_len in lengths]
    num_blocks = sum(blocks_of) + 2
    torch_dtype = getattr(torch, dtype)
    memory = torch.full((num_blocks, blocks_apart, block_size, width), torch.nan, dtype=torch_dtype)
    cache = memory[:, 0]
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
    table = torch.zeros(len(lengths), max([1, *blocks_of]) + 1, dtype=torch.int32)
    taken = 0
    for b, (_, seq_len) in enumerate(lengths):
        for column in range(blocks_of[b]):
            block = int(order[taken])
            taken += 1
            table[b, column] = block
            filled = min(block_size, seq_len - column * block_size)
            cache[block, :filled] = rand(filled, width, dtype=dtype, seed=seed + block)
    if cache_dtype is not None:
        cache = stored(cache, getattr(torch, cache_dtype), k_scale)
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0)
    tokens = int(starts[-1]) + padding
    query = rand(tokens, num_heads, width + 3, dtype=dtype, device=device, seed=seed)
    return MLACase(
        query[..., :latent_dim],
        query[..., latent_dim + 1 : width + 1],
        moved(cache, device),
        table.to(device),
        starts.int().to(device),
        torch.tensor([n for _, n in lengths], dtype=torch.int32, device=device),
        scale=width**-0.5,
        k_scale=k_scale,
    )


def with_topk(case: MLACase, most: int, seed: int = 0) -> MLACase:
    """The case with a random choice of up to ``most`` visible tokens for each token."""
    generator = torch.Generator().manual_seed(seed)
    topk_indices = torch.full((case.query.shape[0], most), -1, dtype=torch.int32)
    starts = case.cu_seqlens_q.tolist()
    for b, seq_len in enumerate(case.seq_lens.tolist()):
        for row in range(starts[b], starts[b + 1]):
            seen = seq_len - starts[b + 1] + row + 1
            chosen = torch.randperm(seen, generator=generator)[:most].sort().values
            topk_indices[row, : len(chosen)] = chosen
    return replace(case, topk_indices=topk_indices.to(case.query.device))


class MLAConformance(OpSuite):
    """``mla_cache_write``, ``mla_attention`` and ``head_linear``."""

    def latent(self, lengths: Sequence[tuple[int, int]], dtype: str, **options: Any) -> MLACase:
        return mla_case(lengths, dtype=dtype, device=self.device, **options)

    @pytest.mark.parametrize("block_size", [8, 16, 64])
    @pytest.mark.parametrize("blocks_apart", [1, 3])
    def test_mla_attention(
        self, op: Callable[[str], Any], dtype: str, block_size: int, blocks_apart: int
    ) -> None:
        case = self.latent(LENGTHS, dtype, block_size=block_size, blocks_apart=blocks_apart)
        self.check(case.run(op("mla_attention")), case.expected(), dtype)

    @pytest.mark.parametrize("heads", [1, 7, 16, 40])
    @pytest.mark.parametrize(("latent_dim", "rope_dim"), [(512, 64), (33, 6), (64, 64)])
    def test_mla_attention_heads(
        self, op: Callable[[str], Any], dtype: str, heads: int, latent_dim: int, rope_dim: int
    ) -> None:
        case = self.latent(
            [(1, 40), (9, 20), (1, 3)],
            dtype,
            num_heads=heads,
            latent_dim=latent_dim,
            rope_dim=rope_dim,
        )
        self.check(case.run(op("mla_attention")), case.expected(), dtype)

    def test_mla_attention_of_nothing(self, op: Callable[[str], Any], dtype: str) -> None:
        case = self.latent([], dtype)
        assert case.run(op("mla_attention")).shape == (0, 4, 40)
        case = self.latent([(0, 5), (2, 7), (0, 0)], dtype, padding=3)
        out = case.run(op("mla_attention"))
        self.check(out, case.expected(), dtype)
        assert (out[2:] == 0).all()

    def test_mla_attention_over_a_long_context(self, op: Callable[[str], Any], dtype: str) -> None:
        case = self.latent([(1, 1400), (9, 1030), (1, 513)], dtype, num_heads=16)
        self.check(case.run(op("mla_attention")), case.expected(), dtype)

    @pytest.mark.parametrize("heads", [4, 48])
    def test_mla_attention_is_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str, heads: int
    ) -> None:
        """In a batch, alone, in chunks, one by one: the same bits."""
        attention = invariant_op("mla_attention")
        case = self.latent([*LENGTHS, *LONG_LENGTHS], dtype, num_heads=heads)
        together = case.run(attention)
        for b in range(len(case.seq_lens)):
            start, end = int(case.cu_seqlens_q[b]), int(case.cu_seqlens_q[b + 1])
            assert bits_equal(case.request(b).run(attention), together[start:end]), b
            for cut in range(0, end - start, 9):
                row = case.request(b, cut, cut + 1).run(attention)
                assert bits_equal(row, together[start + cut : start + cut + 1]), (b, cut)

    def test_mla_attention_of_a_shared_prefix(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        attention = invariant_op("mla_attention")
        case = self.latent([(1, 1400), (1, 1030), (1, 1100), (1, 40)], dtype, num_heads=16)
        case.block_table[1:3, :64] = case.block_table[0, :64]
        together = case.run(attention)
        self.check(together, case.expected(), dtype)
        for b in range(4):
            assert bits_equal(case.request(b).run(attention), together[b : b + 1]), b

    @pytest.mark.parametrize("block_size", [8, 64])
    @pytest.mark.parametrize("blocks_apart", [1, 3])
    def test_mla_attention_to_picked_tokens(
        self, op: Callable[[str], Any], dtype: str, block_size: int, blocks_apart: int
    ) -> None:
        case = self.latent(LENGTHS, dtype, block_size=block_size, blocks_apart=blocks_apart)
        case = with_topk(case, 20)
        self.check(case.run(op("mla_attention")), case.expected(), dtype)
        case = with_topk(self.latent([(0, 5), (2, 7), (0, 0)], dtype, padding=3), 5)
        out = case.run(op("mla_attention"))
        self.check(out, case.expected(), dtype)
        assert (out[2:] == 0).all()

    def test_mla_attention_to_picked_tokens_is_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        attention = invariant_op("mla_attention")
        case = with_topk(self.latent([(1, 1400), (9, 1030), (1, 1), (5, 20)], dtype), 600)
        together = case.run(attention)
        self.check(together, case.expected(), dtype)
        for b in range(len(case.seq_lens)):
            start, end = int(case.cu_seqlens_q[b]), int(case.cu_seqlens_q[b + 1])
            assert bits_equal(case.request(b).run(attention), together[start:end]), b
            row = case.request(b, end - start - 1).run(attention)
            assert bits_equal(row, together[end - 1 : end]), b

    def test_latent_cache_write(self, op: Callable[[str], Any], dtype: str) -> None:
        """Rows that lie apart go to their slots; negative slots and padding go nowhere."""
        cache = self.latent([(1, 100)], dtype, blocks_apart=2).cache
        expected = cache.clone()
        latent = self.rand(9, 70, dtype=dtype)[:, 10:50]
        rope_key = self.rand(9, 20, dtype=dtype, seed=1)[:, 5:13]
        slots = torch.tensor([3, -1, 100, 17, 16, -1, 5], device=self.device)
        op("mla_cache_write")(latent, rope_key, cache, slots)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot // 16, slot % 16] = torch.cat((latent[row], rope_key[row]))
        assert bits_equal(cache, expected)

    @pytest.mark.parametrize("scaled", [False, True])
    def test_latents_in_one_byte(
        self, op: Callable[[str], Any], dtype: str, cache_dtype: str, scaled: bool
    ) -> None:
        """Written as the reference writes them; attended to as the very bytes stored."""
        scale = (
            torch.tensor([0.013], device=self.device) if scaled or cache_dtype == "int8" else None
        )
        case = self.latent(
            [*LENGTHS, (1, 700)], dtype, cache_dtype=cache_dtype, k_scale=scale, num_heads=7
        )
        self.check(case.run(op("mla_attention")), case.expected(), dtype)
        some = with_topk(case, 20)
        self.check(some.run(op("mla_attention")), some.expected(), dtype)
        latent = self.rand(9, 70, dtype=dtype)[:, 10:50]
        rope_key = self.rand(9, 20, dtype=dtype, seed=1)[:, 5:13] * 500
        slots = torch.tensor([3, -1, 100, 17, 16, -1, 5], device=self.device)
        expected = case.cache.clone()
        for write, cache in (
            (reference.mla_cache_write, expected),
            (op("mla_cache_write"), case.cache),
        ):
            write(latent, rope_key, cache, slots, k_scale=scale)
        assert torch.equal(as_bytes(case.cache), as_bytes(expected))

    def test_latent_cache_write_of_nothing(self, op: Callable[[str], Any], dtype: str) -> None:
        cache = self.latent([(1, 20)], dtype).cache
        before = cache.clone()
        nothing = self.rand(0, 48, dtype=dtype)
        slots = torch.zeros(0, dtype=torch.int64, device=self.device)
        op("mla_cache_write")(nothing[:, :40], nothing[:, 40:], cache, slots)
        assert bits_equal(cache, before)

    HEAD_SHAPES: ClassVar = [(1, 1, 1), (4, 33, 17), (3, 64, 128), (16, 512, 48), (2, 130, 96)]
    """(heads, N, K)."""

    @pytest.mark.parametrize(("heads", "features", "inputs"), HEAD_SHAPES)
    def test_head_linear(
        self, op: Callable[[str], Any], dtype: str, heads: int, features: int, inputs: int
    ) -> None:
        head_linear = op("head_linear")
        weight = self.rand(heads, features, inputs, dtype=dtype) * inputs**-0.5
        packed = head_linear.pack(weight)
        assert (packed.in_features, packed.out_features) == (inputs, features)
        for rows in (0, 1, 2, 7, 33, 200):
            x = self.rand(rows, heads, inputs, dtype=dtype)
            expected = torch.einsum("thk,hnk->thn", x.cpu().double(), weight.cpu().double())
            self.check(head_linear(x, packed), expected, dtype)

    def test_head_linear_of_slices(self, op: Callable[[str], Any], dtype: str) -> None:
        """Heads that are parts of wider ones, weights that are parts of one matrix."""
        head_linear = op("head_linear")
        whole = self.rand(3, 40, 24, dtype=dtype) / 5
        x = self.rand(9, 3, 30, dtype=dtype)[::2, :, 4:28]
        for weight in (whole, whole[:, 7:20], whole.transpose(1, 2)[:, :, :24]):
            expected = torch.einsum("thk,hnk->thn", x.cpu().double(), weight.cpu().double())
            self.check(head_linear(x, head_linear.pack(weight)), expected, dtype)

    def test_head_linear_is_invariant(self, invariant_op: Callable[[str], Any], dtype: str) -> None:
        head_linear = invariant_op("head_linear")
        packed = head_linear.pack(self.rand(5, 130, 96, dtype=dtype))
        x = self.rand(200, 5, 96, dtype=dtype)
        self.check_rows(x[:70], lambda rows: head_linear(rows, packed))
        assert bits_equal(head_linear(x, packed)[:70], head_linear(x[:70], packed))
