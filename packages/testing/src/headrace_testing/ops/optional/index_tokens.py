"""``index_tokens``: the tokens that sparse MLA attends to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_reference.index_tokens import index_tokens
from headrace_testing.ops.inputs import rand
from headrace_testing.ops.mla import LENGTHS, LONG_LENGTHS, MLACase, mla_case
from headrace_testing.ops.suite import OpSuite


@dataclass(frozen=True)
class IndexCase:
    """Inputs of one call of ``index_tokens``."""

    where: MLACase
    """Queries of which the part that asks latents is meant, and keys as wide as both parts of it."""
    weights: Tensor
    top_k: int

    def run(self, op: Callable[..., Tensor]) -> Tensor:
        where = self.where
        options = {name: where._options()[name] for name in ("max_seqlen_q", "max_seqlen_k")}
        return op(
            where.query, self.weights, where.cache, where.block_table, where.cu_seqlens_q,
            where.seq_lens, top_k=self.top_k, **options,
        )  # fmt: skip

    def request(self, b: int, first: int = 0, last: int | None = None) -> IndexCase:
        start, end = int(self.where.cu_seqlens_q[b]), int(self.where.cu_seqlens_q[b + 1])
        rows = slice(start + first, end if last is None else start + last)
        return replace(self, where=self.where.request(b, first, last), weights=self.weights[rows])


def index_case(
    lengths: Sequence[tuple[int, int]],
    *,
    dtype: str,
    device: str = "cpu",
    top_k: int,
    heads: int = 4,
    dim: int = 48,
    whole: bool = False,
    **options: Any,
) -> IndexCase:
    """A batch as that of :func:`mla_case`. ``whole``: numbers are small integers, whose scores are
    exact in every dtype, and often equal."""
    where = mla_case(
        lengths, dtype=dtype, device=device, num_heads=heads, latent_dim=dim, rope_dim=0, **options
    )
    weights = rand(where.query.shape[0], heads + 1, dtype=dtype, device=device, seed=9)[:, :heads]
    if whole:
        where.cache.round_()
        where, weights = replace(where, query=where.query.round()), weights.round()
    return IndexCase(where, weights, top_k)


class IndexTokensConformance(OpSuite):
    """Fewer tokens than are asked for, as many, more; equal scores; no request."""

    @pytest.mark.parametrize(
        ("top_k", "heads", "dim", "block_size"), [(1, 1, 33, 8), (20, 4, 48, 16), (90, 24, 128, 64)]
    )
    def test_index_tokens(
        self,
        op: Callable[[str], Any],
        dtype: str,
        top_k: int,
        heads: int,
        dim: int,
        block_size: int,
    ) -> None:
        """Fewer tokens than are picked, as many, more; scores that are equal, and padding."""
        case = index_case(
            [*LENGTHS, (2, 1500), (0, 5)], dtype=dtype, device=self.device, top_k=top_k, heads=heads,
            dim=dim, block_size=block_size, blocks_apart=2, padding=3, whole=True,
        )  # fmt: skip
        topk_indices = case.run(op("index_tokens"))
        assert topk_indices.dtype == torch.int32
        assert torch.equal(topk_indices.cpu(), case.run(index_tokens).cpu())
        assert (topk_indices[-3:] == -1).all()

    def test_index_tokens_is_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        index = invariant_op("index_tokens")
        lengths = [*LENGTHS, *LONG_LENGTHS]
        case = index_case(lengths, dtype=dtype, device=self.device, top_k=33, heads=5, dim=72)
        together = case.run(index)
        for b in range(len(lengths)):
            start, end = int(case.where.cu_seqlens_q[b]), int(case.where.cu_seqlens_q[b + 1])
            assert torch.equal(case.request(b).run(index), together[start:end]), b
            for cut in range(0, end - start, 9):
                row = case.request(b, cut, cut + 1).run(index)
                assert torch.equal(row, together[start + cut : start + cut + 1]), (b, cut)

    def test_index_tokens_of_nothing(self, op: Callable[[str], Any], dtype: str) -> None:
        case = index_case([], dtype=dtype, device=self.device, top_k=7)
        assert case.run(op("index_tokens")).shape == (0, 7)
