"""Attention over the paged cache where tokens see later ones than themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from headrace_core.errors import ConfigError
from headrace_testing.ops.inputs import bits_equal
from headrace_testing.ops.paged import PagedCase, paged_case
from headrace_testing.ops.suite import OpSuite


class LastKeysConformance(OpSuite):
    """``paged_attention`` with ``last_keys``."""

    SEEN_LENGTHS: ClassVar = [(1, 70), (40, 130), (60, 60), (90, 700), (3, 35)]
    """(new tokens, context)."""
    SEEN_SPANS: ClassVar = [(1, 95, 120), (2, 0, 5), (2, 5, 33), (2, 59, 60), (3, 620, 700)]
    """(request, first, end): tokens that all see each other."""

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"num_heads": 8, "num_kv_heads": 1, "head_dim": 40},
            {"sliding_window": 20, "soft_cap": 5.0},
            {"sliding_window": 600, "block_size": 8},
        ],
        ids=str,
    )
    def test_paged_attention_last_keys(
        self, op: Callable[[str], Any], dtype: str, options: dict[str, Any]
    ) -> None:
        case = self._case(dtype, **options)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    def test_paged_attention_last_keys_by_definition(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        """Rows of a span: attention to all keys up to its end. Others: as without spans."""
        attention, case = op("paged_attention"), self._case(dtype)
        out, plain = case.run(attention), self._without(case).run(attention)
        inside = torch.zeros(out.shape[0], dtype=torch.bool)
        for b, first, end in self.SEEN_SPANS:
            start = int(case.cu_seqlens_q[b])
            context = int(case.seq_lens[b]) - (int(case.cu_seqlens_q[b + 1]) - start)
            rows = slice(start + first - context, start + end - context)
            inside[rows] = True
            whole = self._without(case).request(b, first - context, end - context)
            both_ways = replace(whole, options={**whole.options, "causal": False})
            self.check(out[rows], both_ways.expected(), dtype)
        self.check(out[~inside], plain[~inside], dtype)

    def test_paged_attention_last_keys_are_the_last(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        """What lies behind a span reaches none of its rows."""
        attention, case = op("paged_attention"), self._case(dtype)
        before = case.run(attention)
        block = int(case.block_table[1, 120 // 16])
        case.value_cache[block, 120 % 16] += 1
        after, row = case.run(attention), int(case.cu_seqlens_q[1]) + 120 - 90
        assert bits_equal(after[:row], before[:row])
        assert not bits_equal(after[row], before[row])

    @pytest.mark.parametrize("options", [{}, {"num_heads": 8, "num_kv_heads": 1}], ids=str)
    def test_paged_attention_last_keys_do_not_depend_on_the_batch(
        self, invariant_op: Callable[[str], Any], dtype: str, options: dict[str, Any]
    ) -> None:
        attention, case = invariant_op("paged_attention"), self._case(dtype, **options)
        together = case.run(attention)
        for b in range(len(case.seq_lens)):
            start, end = int(case.cu_seqlens_q[b]), int(case.cu_seqlens_q[b + 1])
            assert bits_equal(case.request(b).run(attention), together[start:end]), f"request {b}"
        start = int(case.cu_seqlens_q[2])
        parts = [case.request(2, first, last) for first, last in [(0, 5), (5, 34), (34, 60)]]
        in_three = torch.cat([part.run(attention) for part in parts])
        assert bits_equal(in_three, together[start : start + 60]), "chunks change bits"

    SEEN_PIECES: ClassVar = [(1, 92, 96, 110, 120), (2, 5, 33), (3, 612, 640, 650, 651, 690, 700)]
    """(request, first, end, first, end, ...): tokens that all see each other, with others between."""

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"num_heads": 8, "num_kv_heads": 1, "head_dim": 40},
            {"num_heads": 3, "num_kv_heads": 1, "sliding_window": 200, "block_size": 8},
            {"head_dim": 128, "soft_cap": 5.0},
        ],
        ids=str,
    )
    def test_paged_attention_last_keys_of_pieces(
        self, op: Callable[[str], Any], dtype: str, options: dict[str, Any]
    ) -> None:
        case = self._case(dtype, spans=self.SEEN_PIECES, **options)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    @pytest.mark.parametrize(
        ("key", "seen_by", "unseen_by"),
        [(115, (92, 95, 110, 119, 125), (96, 109)), (100, (100, 109, 110, 119), (92, 95, 99))],
        ids=["in a piece", "between pieces"],
    )
    def test_paged_attention_last_keys_of_pieces_by_definition(
        self,
        op: Callable[[str], Any],
        dtype: str,
        key: int,
        seen_by: tuple[int, ...],
        unseen_by: tuple[int, ...],
    ) -> None:
        """A later piece is seen by the earlier one, and not by the text between them, which neither sees
        ahead nor is seen from before."""
        attention, case = op("paged_attention"), self._case(dtype, spans=self.SEEN_PIECES)
        before = case.run(attention)
        case.value_cache[int(case.block_table[1, key // 16]), key % 16] += 1
        after, first = case.run(attention), int(case.cu_seqlens_q[1]) - 90
        assert not any(bits_equal(after[first + p], before[first + p]) for p in seen_by)
        assert all(bits_equal(after[first + p], before[first + p]) for p in unseen_by)

    def test_paged_attention_last_keys_of_pieces_do_not_depend_on_the_batch(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        attention, case = invariant_op("paged_attention"), self._case(dtype, spans=self.SEEN_PIECES)
        together = case.run(attention)
        for b in range(len(case.seq_lens)):
            start, end = int(case.cu_seqlens_q[b]), int(case.cu_seqlens_q[b + 1])
            assert bits_equal(case.request(b).run(attention), together[start:end]), f"request {b}"

    @pytest.mark.parametrize("options", [{"causal": False}, {"attention_chunk": 8}], ids=str)
    def test_paged_attention_last_keys_are_refused(
        self, op: Callable[[str], Any], dtype: str, options: dict[str, Any]
    ) -> None:
        case = self._case(dtype)
        refused = replace(case, options={**case.options, **options})
        with pytest.raises(ConfigError, match="last_keys"):
            refused.run(op("paged_attention"))

    def _case(self, dtype: str, **options: Any) -> PagedCase:
        options = {"spans": self.SEEN_SPANS, **options}
        return paged_case(self.SEEN_LENGTHS, dtype=dtype, device=self.device, **options)

    @staticmethod
    def _without(case: PagedCase) -> PagedCase:
        return replace(case, options={**case.options, "last_keys": None})
