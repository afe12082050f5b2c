"""Attention without a cache, of sequences one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import headrace_reference as reference
from headrace_core.errors import ConfigError
from headrace_testing.ops.inputs import bits_equal, call_wide, rand
from headrace_testing.ops.suite import OpSuite


@dataclass(frozen=True)
class VarlenCase:
    """Inputs of one call of ``varlen_attention``, in the order of its parameters."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens: Tensor
    options: Mapping[str, Any]

    def run(self, op: Callable[..., Tensor]) -> Tensor:
        return op(*self._arguments(), **self._maximum(), **self.options)

    def expected(self) -> Tensor:
        op = reference.varlen_attention
        out: Tensor = call_wide(op, *self._arguments(), **self._maximum(), **self.options)
        return out

    def sequence(self, b: int) -> VarlenCase:
        """Sequence b alone."""
        start, end = int(self.cu_seqlens[b]), int(self.cu_seqlens[b + 1])
        rows = slice(start, end)
        key_lens = self.options.get("key_lens")
        own = {} if key_lens is None else {"key_lens": key_lens[b : b + 1]}
        return replace(
            self,
            options={**self.options, **own},
            query=self.query[rows],
            key=self.key[rows],
            value=self.value[rows],
            cu_seqlens=self.cu_seqlens.new_tensor([0, end - start]),
        )

    def _arguments(self) -> tuple[Tensor, ...]:
        return self.query, self.key, self.value, self.cu_seqlens

    def _maximum(self) -> dict[str, int]:
        return {"max_seqlen": max([0, *self.cu_seqlens.diff().tolist()])}


def varlen_case(
    lengths: Sequence[int],
    *,
    dtype: str,
    device: str = "cpu",
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    padding: int = 0,
    **options: Any,
) -> VarlenCase:
    """Sequences of these lengths; query, key and value are slices of one fused projection.

    ``padding`` rows of NaN follow the last sequence.
    """
    tokens, heads = sum(lengths), num_heads + 2 * num_kv_heads
    fused = rand(tokens, heads * head_dim, dtype=dtype, device=device)
    fused = torch.cat([fused, fused.new_full((padding, fused.shape[1]), torch.nan)])
    query, key, value = torch.split(
        torch.unflatten(fused, 1, (heads, head_dim)),
        [num_heads, num_kv_heads, num_kv_heads],
        dim=1,
    )
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return VarlenCase(
        query, key, value, starts.int().to(device), {"scale": head_dim**-0.5, **options}
    )


class VarlenConformance(OpSuite):
    """``varlen_attention``."""

    RAGGED: ClassVar = [1, 5, 64, 0, 17, 33, 129, 2]

    def varlen(self, lengths: Sequence[int], dtype: str, **options: Any) -> VarlenCase:
        return varlen_case(lengths, dtype=dtype, device=self.device, **options)

    def bias(self, heads: int, reach: int) -> Tensor:
        """Bias of every distance within ``reach``."""
        return self.rand(heads, 2 * reach - 1) * 2

    def key_lens(self) -> Tensor:
        """Key lengths of ``RAGGED``."""
        return torch.tensor([1, 3, 64, 0, 1, 20, 70, 0], dtype=torch.int32, device=self.device)

    @pytest.mark.parametrize("lengths", [[1], [5], [64], RAGGED, [300, 7]], ids=str)
    def test_varlen_attention(
        self, op: Callable[[str], Any], dtype: str, lengths: list[int]
    ) -> None:
        case = self.varlen(lengths, dtype)
        self.check(case.run(op("varlen_attention")), case.expected(), dtype)

    @pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (8, 1)])
    @pytest.mark.parametrize("dim", [32, 40, 64, 80, 128])
    def test_varlen_attention_heads(
        self, op: Callable[[str], Any], dtype: str, heads: int, kv_heads: int, dim: int
    ) -> None:
        case = self.varlen([9, 40, 1], dtype, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
        self.check(case.run(op("varlen_attention")), case.expected(), dtype)

    @pytest.mark.parametrize("window", [0, 1, 5, 33, 64, 1000])
    def test_varlen_attention_window(
        self, op: Callable[[str], Any], dtype: str, window: int
    ) -> None:
        case = self.varlen(self.RAGGED, dtype, sliding_window=window)
        self.check(case.run(op("varlen_attention")), case.expected(), dtype)

    def test_varlen_attention_window_border(self, op: Callable[[str], Any], dtype: str) -> None:
        """Both ways, the value at distance W - 1 is seen and the one at W is not."""
        case, attention = self.varlen([40], dtype, sliding_window=8), op("varlen_attention")
        before = case.run(attention)[20]
        for distance, seen in [(-8, False), (-7, True), (7, True), (8, False)]:
            value = case.value.clone()
            value[20 + distance] += 1
            after = replace(case, value=value).run(attention)[20]
            assert bits_equal(after, before) != seen

    @pytest.mark.parametrize("soft_cap", [0.5, 30.0])
    def test_varlen_attention_soft_cap(
        self, op: Callable[[str], Any], dtype: str, soft_cap: float
    ) -> None:
        case = self.varlen(self.RAGGED, dtype, soft_cap=soft_cap)
        self.check(case.run(op("varlen_attention")), case.expected(), dtype)

    @pytest.mark.parametrize("reach", [129, 140, 600])
    def test_varlen_attention_distance_bias(
        self, op: Callable[[str], Any], dtype: str, reach: int
    ) -> None:
        case = self.varlen(self.RAGGED, dtype, distance_bias=self.bias(4, reach))
        self.check(case.run(op("varlen_attention")), case.expected(), dtype)

    @pytest.mark.parametrize("options", [{}, {"sliding_window": 9}, {"head_dim": 40}], ids=str)
    def test_varlen_attention_key_lens(
        self, op: Callable[[str], Any], dtype: str, options: dict[str, Any]
    ) -> None:
        """All of them, some, one; with the window, rows that see nothing."""
        case = self.varlen(self.RAGGED, dtype, key_lens=self.key_lens(), **options)
        self.check(case.run(op("varlen_attention")), case.expected(), dtype)

    def test_varlen_attention_key_lens_border(self, op: Callable[[str], Any], dtype: str) -> None:
        """Memory behind the last key does not matter, NaN included, and the rows before are what
        they are without it."""
        attention = op("varlen_attention")
        case = self.varlen([3, 40, 70], dtype)
        lens = torch.tensor([3, 17, 65], dtype=torch.int32, device=self.device)
        key, value = case.key.clone(), case.value.clone()
        for tensor in (key, value):
            tensor[3 + 17 : 43] = torch.nan
            tensor[43 + 65 :] = torch.nan
        filled = replace(case, key=key, value=value, options={**case.options, "key_lens": lens})
        out = filled.run(attention)
        self.check(out, replace(filled, key=case.key, value=case.value).expected(), dtype)
        for start, length in ((3, 17), (43, 65)):
            rows = slice(start, start + length)
            bounds = case.cu_seqlens.new_tensor([0, length])
            tensors = (case.query[rows], case.key[rows], case.value[rows], bounds)
            self.check(out[rows], VarlenCase(*tensors, case.options).expected(), dtype)

    def test_varlen_attention_key_lens_of_long_sequences(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        """Whole parts of a sequence are no keys."""
        first, second = self.LONG_SEQUENCES
        lens = torch.tensor([first // 2 + 15, 0, 3], dtype=torch.int32, device=self.device)
        for options in ({}, {"sliding_window": 300, "distance_bias": self.bias(2, 1100)}):
            case = self.varlen(
                [first, 4, second], dtype, num_heads=2, num_kv_heads=1, key_lens=lens, **options
            )
            self.check(case.run(op("varlen_attention")), case.expected(), dtype)

    def test_varlen_attention_everything_at_once(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        case = self.varlen(
            self.RAGGED, dtype, sliding_window=20, soft_cap=3.0, scale=0.3, head_dim=40, padding=3,
            distance_bias=self.bias(4, 129), key_lens=self.key_lens(),
        )  # fmt: skip
        self.check(case.run(op("varlen_attention")), case.expected(), dtype)

    def test_varlen_attention_of_separate_tensors(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        case = self.varlen(self.RAGGED, dtype)
        apart = replace(
            case,
            query=case.query.contiguous(),
            key=case.key.transpose(0, 1).contiguous().transpose(0, 1),
            value=case.value.transpose(1, 2).contiguous().transpose(1, 2),
        )
        self.check(apart.run(op("varlen_attention")), case.expected(), dtype)

    @pytest.mark.parametrize("lengths", [[], [0], [3, 4]], ids=str)
    def test_varlen_attention_leaves_rows_past_the_end_zero(
        self, op: Callable[[str], Any], dtype: str, lengths: list[int]
    ) -> None:
        case = self.varlen(lengths, dtype, padding=5)
        out = case.run(op("varlen_attention"))
        self.check(out, case.expected(), dtype)
        assert (out[sum(lengths) :] == 0).all()

    def test_varlen_attention_over_long_sequences(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        """Kernels may cut a long sequence into parts."""
        for options in ({}, {"sliding_window": 300, "distance_bias": self.bias(2, 1100)}):
            case = self.varlen(
                list(self.LONG_SEQUENCES), dtype, num_heads=2, num_kv_heads=1, **options
            )
            self.check(case.run(op("varlen_attention")), case.expected(), dtype)

    def test_varlen_attention_keeps_infinities_to_their_sequence(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        case, attention = self.varlen([20, 30, 10], dtype), op("varlen_attention")
        before = case.run(attention)
        value = case.value.clone()
        value[25] = torch.inf
        after = replace(case, value=value).run(attention)
        for rows in (slice(0, 20), slice(50, 60)):
            assert bits_equal(after[rows], before[rows])
        assert not after[20:50].isfinite().any()

    LONG_SEQUENCES: ClassVar = (1030, 520)
    """Tokens of sequences that kernels may cut into parts."""
    OPTIONS: ClassVar = [
        {},
        {"sliding_window": 20},
        {"soft_cap": 5.0},
        {"num_heads": 8, "num_kv_heads": 1},
        {"num_heads": 3, "num_kv_heads": 3, "head_dim": 40},
    ]

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    @pytest.mark.parametrize("biased", [False, True])
    def test_varlen_attention_does_not_depend_on_the_batch(
        self, invariant_op: Callable[[str], Any], dtype: str, options: dict[str, Any], biased: bool
    ) -> None:
        attention = invariant_op("varlen_attention")
        if biased:
            options = {**options, "distance_bias": self.bias(options.get("num_heads", 4), 700)}
        lengths = [*self.RAGGED, 600, 40]
        case = self.varlen(lengths, dtype, **options)
        together = case.run(attention)
        for b, length in enumerate(lengths):
            start = int(case.cu_seqlens[b])
            alone = case.sequence(b).run(attention)
            assert bits_equal(alone, together[start : start + length]), f"sequence {b} differs"

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_varlen_attention_does_not_depend_on_tokens_that_are_no_keys(
        self, invariant_op: Callable[[str], Any], dtype: str, options: dict[str, Any]
    ) -> None:
        attention, real, lengths = invariant_op("varlen_attention"), [9, 32, 600], [32, 32, 700]
        case = self.varlen(lengths, dtype, **options)
        lens = torch.tensor(real, dtype=torch.int32, device=self.device)
        filled = replace(case, options={**case.options, "key_lens": lens})
        together = filled.run(attention)
        for b, length in enumerate(real):
            start = int(case.cu_seqlens[b])
            rows = slice(start, start + length)
            bounds = case.cu_seqlens.new_tensor([0, length])
            tensors = (case.query[rows], case.key[rows], case.value[rows], bounds)
            alone = VarlenCase(*tensors, case.options).run(attention)
            assert bits_equal(alone, together[rows]), f"sequence {b} differs"
            whole = filled.sequence(b).run(attention)
            assert bits_equal(whole, together[start : start + lengths[b]])

    def test_varlen_attention_refuses_what_does_not_fit(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        attention = op("varlen_attention")
        case = self.varlen([5, 9], dtype, num_heads=4, num_kv_heads=2)
        with pytest.raises(ConfigError, match="distance_bias"):
            replace(case, options={**case.options, "distance_bias": self.bias(4, 8)}).run(attention)
        with pytest.raises(ConfigError, match="key"):
            replace(case, key=case.key[:3]).run(attention)
        lens = torch.tensor([5], dtype=torch.int32, device=self.device)
        with pytest.raises(ConfigError, match="key_lens"):
            replace(case, options={**case.options, "key_lens": lens}).run(attention)
