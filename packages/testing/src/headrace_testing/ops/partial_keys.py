"""Attention to a part of the keys: counts of keys by row, and the log-sum-exp that joins parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import headrace_reference as reference
from headrace_core.errors import ConfigError
from headrace_testing.ops.inputs import bits_equal, call_wide
from headrace_testing.ops.mla import MLACase, mla_case
from headrace_testing.ops.paged import PagedCase, paged_case
from headrace_testing.ops.suite import OpSuite

LSE_TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}


class PartialKeysConformance(OpSuite):
    """``paged_attention`` and ``mla_attention`` with ``key_counts`` and ``lse``."""

    partial_keys: ClassVar[bool] = True
    """False: the provider's ops refuse both by TypeError."""
    PARTIAL_LENGTHS: ClassVar = [
        (1, 1),
        (1, 70),
        (40, 25),
        (60, 60),
        (90, 700),
        (3, 0),
        (1, 0),
        (1, 1500),
        (1, 1400),
    ]
    """(new tokens, keys): more tokens than keys, too, and none."""

    @pytest.fixture(autouse=True)
    def _only_where_served(self) -> None:
        if not self.partial_keys:
            pytest.skip("the provider does not attend to parts of the keys")

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"num_heads": 8, "num_kv_heads": 1, "head_dim": 40},
            {"num_heads": 3, "num_kv_heads": 3, "block_size": 8, "soft_cap": 5.0},
        ],
        ids=str,
    )
    def test_paged_attention_key_counts(
        self, op: Callable[[str], Any], dtype: str, options: dict[str, Any]
    ) -> None:
        attention = op("paged_attention")
        case = paged_case(self.PARTIAL_LENGTHS, dtype=dtype, device=self.device, **options)
        case = replace(case, options={**case.options, "key_counts": self._counts(case)})
        lse = self._lse(case)
        out = replace(case, options={**case.options, "lse": lse}).run(attention)
        expected_lse = self._lse(case, torch.float64, "cpu")
        expected = replace(case, options={**case.options, "lse": expected_lse}).expected()
        self.check(out, expected, dtype)
        self._check_lse(lse, expected_lse, dtype)
        assert (lse == -torch.inf).any()
        assert bits_equal(case.run(attention), out), "a log-sum-exp that is wanted changes bits"

    def test_paged_attention_lse(self, op: Callable[[str], Any], dtype: str) -> None:
        """Without counts, whatever else there is: windows, sinks and what all rows see."""
        attention = op("paged_attention")
        sinks = self.rand(4, seed=3)
        for options in ({}, {"sliding_window": 20}, {"sinks": sinks}, {"prefix": 3}):
            case = paged_case(
                [(1, 70), (40, 130), (1, 1)], dtype=dtype, device=self.device, **options
            )
            lse, wide = self._lse(case), self._lse(case, torch.float64, "cpu")
            out = replace(case, options={**case.options, "lse": lse}).run(attention)
            replace(case, options={**case.options, "lse": wide}).expected()
            self._check_lse(lse, wide, dtype)
            assert bits_equal(case.run(attention), out)

    def test_paged_attention_parts_join(self, op: Callable[[str], Any], dtype: str) -> None:
        """Parts of the keys, each weighed by its log-sum-exp, are attention to all of them."""
        attention = op("paged_attention")
        whole = paged_case([(9, 50)], dtype=dtype, device=self.device, block_size=1)
        outs, lses = [], []
        for part in range(3):
            own = torch.arange(part, 50, 3, device=self.device)
            counts = (torch.arange(41, 50, device=self.device)[:, None] >= own).sum(1).int()
            lse = self._lse(whole)
            case = replace(
                whole,
                block_table=whole.block_table[:, own],
                seq_lens=torch.tensor([len(own)], dtype=torch.int32, device=self.device),
                options={**whole.options, "key_counts": counts, "lse": lse},
            )
            outs.append(case.run(attention).double())
            lses.append(lse.double())
        weights = torch.stack(lses).softmax(0)[..., None]
        self.check((torch.stack(outs) * weights).sum(0).to(outs[0].dtype).to(whole.query.dtype),
                   whole.expected(), dtype)  # fmt: skip

    def test_paged_attention_key_counts_do_not_depend_on_the_batch(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        attention = invariant_op("paged_attention")
        case = paged_case(self.PARTIAL_LENGTHS, dtype=dtype, device=self.device)
        counts, lse = self._counts(case), self._lse(case)
        together = replace(case, options={**case.options, "key_counts": counts, "lse": lse}).run(
            attention
        )
        for b in range(len(case.seq_lens)):
            start, end = int(case.cu_seqlens_q[b]), int(case.cu_seqlens_q[b + 1])
            for first, last in ((start, end), (end - 1, end), (start, (start + end + 1) // 2)):
                own = torch.empty(last - first, *lse.shape[1:], device=self.device)
                alone = replace(
                    case,
                    query=case.query[first:last],
                    block_table=case.block_table[b : b + 1],
                    cu_seqlens_q=case.cu_seqlens_q.new_tensor([0, last - first]),
                    seq_lens=case.seq_lens[b : b + 1],
                    options={**case.options, "key_counts": counts[first:last], "lse": own},
                )
                assert bits_equal(alone.run(attention), together[first:last]), (b, first, last)
                assert bits_equal(own, lse[first:last]), (b, first, last)

    def test_paged_attention_key_counts_of_rising_rows_are_causal(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        """All keys up to its own: the bits of attention by positions."""
        attention = invariant_op("paged_attention")
        lengths = [(1, 70), (40, 130), (60, 60), (1, 900)]
        case = paged_case(lengths, dtype=dtype, device=self.device)
        positions = [torch.arange(length - new, length) for new, length in lengths]
        counts = (torch.cat(positions) + 1).int().to(self.device)
        counted = replace(case, options={**case.options, "key_counts": counts})
        assert bits_equal(counted.run(attention), case.run(attention))

    @pytest.mark.parametrize(
        "options",
        [{"causal": False}, {"attention_chunk": 8}, {"sliding_window": 8}, {"alibi": True},
         {"with_logit_scale": True}, {"spans": [(0, 2, 4)]}],
        ids=str,
    )  # fmt: skip
    def test_paged_attention_key_counts_are_refused(
        self, op: Callable[[str], Any], dtype: str, options: dict[str, Any]
    ) -> None:
        case = paged_case([(5, 9)], dtype=dtype, device=self.device, **options)
        counted = replace(case, options={**case.options, "key_counts": self._counts(case)})
        with pytest.raises(ConfigError, match="key_counts"):
            counted.run(op("paged_attention"))

    @pytest.mark.parametrize("heads", [1, 5, 16])
    def test_mla_attention_key_counts(
        self, op: Callable[[str], Any], dtype: str, heads: int
    ) -> None:
        attention = op("mla_attention")
        case = mla_case(
            self.PARTIAL_LENGTHS, dtype=dtype, device=self.device, num_heads=heads, padding=2
        )
        counts = self._counts(case)
        counts = torch.cat([counts, counts.new_zeros(2)])
        lse, wide = self._lse(case), self._lse(case, torch.float64, "cpu")
        arguments, options = case._arguments(), {**case._options(), "key_counts": counts}
        out = attention(*arguments, **options, lse=lse)
        expected = call_wide(reference.mla_attention, *arguments, **options, lse=wide)
        self.check(out, expected, dtype)
        self._check_lse(lse, wide, dtype)
        assert (lse[-2:] == -torch.inf).all()
        assert bits_equal(attention(*arguments, **options), out)
        plain, own = case.run(attention), self._lse(case)
        assert bits_equal(attention(*arguments, **case._options(), lse=own), plain)

    def test_mla_attention_key_counts_and_topk_are_refused(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        case = mla_case([(2, 5)], dtype=dtype, device=self.device)
        picked = torch.zeros(2, 1, dtype=torch.int32, device=self.device)
        options = {**case._options(), "topk_indices": picked, "key_counts": self._counts(case)}
        with pytest.raises(ConfigError, match="key_counts"):
            op("mla_attention")(*case._arguments(), **options)

    def _counts(self, case: PagedCase | MLACase) -> Tensor:
        """Counts that rise in some requests, fall in others, and go past the keys."""
        counts = []
        for b, length in enumerate(case.seq_lens.tolist()):
            new = int(case.cu_seqlens_q[b + 1] - case.cu_seqlens_q[b])
            rising = (
                torch.linspace(0, length + 3, new) if new > 1 else torch.tensor([float(length)])
            )
            counts.append(rising.flip(0) if b == 3 else rising)
        return torch.cat(counts).int().to(self.device)

    def _lse(
        self,
        case: PagedCase | MLACase,
        dtype: torch.dtype = torch.float32,
        device: str | None = None,
    ) -> Tensor:
        return torch.full(case.query.shape[:2], 7.0, dtype=dtype, device=device or self.device)

    def _check_lse(self, actual: Tensor, expected: Tensor, dtype: str) -> None:
        blind = expected == -torch.inf
        assert torch.equal(actual.cpu() == -torch.inf, blind)
        torch.testing.assert_close(
            actual.cpu().double()[~blind],
            expected[~blind],
            rtol=LSE_TOLERANCES[dtype],
            atol=LSE_TOLERANCES[dtype],
        )
