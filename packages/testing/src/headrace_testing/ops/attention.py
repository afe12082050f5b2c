"""Attention over the paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from headrace_core.errors import ConfigError
from headrace_core.ops import ONE_BYTE_CACHES
from headrace_testing.ops.inputs import bits_equal
from headrace_testing.ops.paged import PagedCase, paged_case
from headrace_testing.ops.suite import OpSuite


class AttentionConformance(OpSuite):
    """``paged_attention``."""

    MIXED: ClassVar = [(1, 1), (1, 70), (5, 5), (17, 90), (3, 35), (1, 16), (1, 129)]
    """(new tokens, context): decode, prefill and chunks together."""

    def paged(self, lengths: Sequence[tuple[int, int]], dtype: str, **options: Any) -> PagedCase:
        if options.get("with_logit_scale") and not self.logit_scale:
            pytest.skip("scores that are multiplied by position are not among this class's")
        return paged_case(lengths, dtype=dtype, device=self.device, **options)

    @pytest.mark.parametrize("block_size", [8, 16, 32])
    @pytest.mark.parametrize("layout", ["NHD", "HND", "pair"])
    def test_paged_attention(
        self, op: Callable[[str], Any], dtype: str, block_size: int, layout: str
    ) -> None:
        case = self.paged(self.MIXED, dtype, block_size=block_size, layout=layout)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    @pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (8, 1), (5, 1)])
    @pytest.mark.parametrize("dim", [16, 40, 64, 80, 128])
    def test_paged_attention_heads(
        self, op: Callable[[str], Any], dtype: str, heads: int, kv_heads: int, dim: int
    ) -> None:
        case = self.paged(
            [(1, 40), (9, 20), (1, 3)], dtype, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim
        )
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    @pytest.mark.parametrize("window", [0, 1, 5, 16, 33, 1000])
    def test_paged_attention_window(
        self, op: Callable[[str], Any], dtype: str, window: int
    ) -> None:
        case = self.paged([*self.MIXED, (40, 130)], dtype, sliding_window=window)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    def test_paged_attention_window_border(self, op: Callable[[str], Any], dtype: str) -> None:
        """The key at distance W - 1 is seen, the one at W is not."""
        case = self.paged([(1, 40)], dtype, sliding_window=8)
        attention = op("paged_attention")
        before = case.run(attention)
        for distance, seen in [(7, True), (8, False)]:
            place = 39 - distance
            block = int(case.block_table[0, place // 16])
            kept = case.value_cache[block, place % 16].clone()
            case.value_cache[block, place % 16] += 1
            assert bits_equal(case.run(attention), before) != seen
            case.value_cache[block, place % 16] = kept

    @pytest.mark.parametrize("chunk", [1, 5, 16, 33, 1000])
    def test_paged_attention_chunk(self, op: Callable[[str], Any], dtype: str, chunk: int) -> None:
        case = self.paged([*self.MIXED, (40, 130), (3, 33)], dtype, attention_chunk=chunk)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    def test_paged_attention_chunk_border(self, op: Callable[[str], Any], dtype: str) -> None:
        """A chunk's first key is seen, the one before is not, and the next chunk sees neither."""
        case = self.paged([(1, 40)], dtype)
        case = replace(case, options={**case.options, "attention_chunk": 13})  # 39 begins one
        before_it = replace(case, seq_lens=case.seq_lens - 1)
        attention = op("paged_attention")
        for place, seen in [(39, (True, False)), (38, (False, True)), (26, (False, True)),
                            (25, (False, False))]:  # fmt: skip
            block = int(case.block_table[0, place // 16])
            before = [case.run(attention), before_it.run(attention)]
            kept = case.value_cache[block, place % 16].clone()
            case.value_cache[block, place % 16] += 1
            after = [case.run(attention), before_it.run(attention)]
            case.value_cache[block, place % 16] = kept
            changed = [not bits_equal(a, b) for a, b in zip(after, before)]
            assert changed == list(seen), place

    @pytest.mark.parametrize("options", [{}, {"num_heads": 6, "head_dim": 40}], ids=str)
    def test_paged_attention_alibi(
        self, op: Callable[[str], Any], dtype: str, options: dict[str, Any]
    ) -> None:
        case = self.paged(self.MIXED, dtype, alibi=True, **options)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    def test_paged_attention_alibi_by_the_root(self, op: Callable[[str], Any], dtype: str) -> None:
        case = self.paged(self.MIXED, dtype, alibi=True, alibi_sqrt=True)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    @pytest.mark.parametrize(
        "options", [{}, {"soft_cap": 2.0}, {"num_heads": 8, "num_kv_heads": 1}], ids=str
    )
    def test_paged_attention_logit_scale(
        self, op: Callable[[str], Any], dtype: str, options: dict[str, Any]
    ) -> None:
        """Also for rows that see the same keys: heads of a group, and tokens after a long context."""
        lengths = [*self.MIXED, (40, 130), (9, 700)]
        case = self.paged(lengths, dtype, with_logit_scale=True, **options)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    @pytest.mark.parametrize(
        "options",
        [{}, {"num_heads": 6, "num_kv_heads": 3, "head_dim": 40, "sliding_window": 20}],
        ids=str,
    )
    @pytest.mark.parametrize("sinks", [False, True])
    def test_paged_attention_with_a_prefix(
        self, op: Callable[[str], Any], dtype: str, options: dict[str, Any], sinks: bool
    ) -> None:
        if sinks:
            options = {**options, "sinks": self.rand(options.get("num_heads", 4))}
        case = self.paged(self.MIXED, dtype, prefix=19, **options)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    @pytest.mark.parametrize("soft_cap", [0.5, 30.0])
    def test_paged_attention_soft_cap(
        self, op: Callable[[str], Any], dtype: str, soft_cap: float
    ) -> None:
        case = self.paged(self.MIXED, dtype, soft_cap=soft_cap)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    def test_paged_attention_soft_cap_of_huge_scores(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        case = self.paged([(5, 40)], dtype, soft_cap=20.0, scale=1000.0)
        out = case.run(op("paged_attention"))
        assert torch.isfinite(out).all()
        self.check(out, case.expected(), dtype)

    def test_paged_attention_sinks(self, op: Callable[[str], Any], dtype: str) -> None:
        sinks = self.rand(4) * 2
        case = self.paged(self.MIXED, dtype, sinks=sinks)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    def test_paged_attention_everything_at_once(self, op: Callable[[str], Any], dtype: str) -> None:
        sinks = self.rand(4, dtype=dtype)
        case = self.paged(
            self.MIXED, dtype, sinks=sinks, soft_cap=3.0, sliding_window=20, scale=0.3, head_dim=40
        )
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    def test_paged_attention_everything_of_chunks(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        sinks = self.rand(4, dtype=dtype)
        case = self.paged(
            self.MIXED, dtype, sinks=sinks, soft_cap=3.0, attention_chunk=20, scale=0.3, alibi=True,
            head_dim=40,
        )  # fmt: skip
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"attention_chunk": 8, "causal": False}, "attention_chunk"),
            ({"alibi": True, "causal": False}, "alibi_slopes"),
            ({"alibi_sqrt": True}, "alibi_sqrt = True without alibi_slopes"),
            ({"prefix": 3, "soft_cap": 2.0}, "a KV prefix has no soft cap"),
            ({"prefix": 3, "alibi": True}, "a KV prefix has no soft cap"),
            ({"prefix": 3, "kv_prefix_value": None}, "both None"),
            ({"attention_chunk": 8, "sliding_window": 4}, "attention_chunk = 8"),
            ({"attention_chunk": 0}, "attention_chunk = 0"),
        ],
        ids=str,
    )
    def test_paged_attention_refuses_what_excludes_each_other(
        self, op: Callable[[str], Any], dtype: str, options: dict[str, Any], words: str
    ) -> None:
        options = dict(options)
        made = {name: options.pop(name) for name in ("alibi", "prefix") if name in options}
        case = self.paged([(1, 40)], dtype, **made)
        refused = replace(case, options={**case.options, **options})
        with pytest.raises(ConfigError, match=words):
            refused.run(op("paged_attention"))

    @pytest.mark.parametrize("dim", [40, 64, 128])
    @pytest.mark.parametrize(
        "options",
        [{}, {"sliding_window": 20, "soft_cap": 3.0}, {"attention_chunk": 20, "alibi": True}],
        ids=str,
    )
    def test_paged_attention_over_a_cache_of_one_byte(
        self,
        op: Callable[[str], Any],
        dtype: str,
        cache_dtype: str,
        dim: int,
        options: dict[str, Any],
    ) -> None:
        """Against the reference over the very bytes stored."""
        for scales in ({}, self.cache_scales(2)):
            if cache_dtype == "int8" and not scales:
                options = {**options, "scale": 0.01}
            case = self.paged(
                self.MIXED, dtype, head_dim=dim, cache_dtype=cache_dtype, **options, **scales
            )
            self.check(case.run(op("paged_attention")), case.expected(), dtype)

    CROSS: ClassVar = [(1, 33), (4, 7), (40, 16), (3, 600), (20, 1), (5, 0)]
    """(new tokens, encoder states): the queries are not the keys' own tokens."""

    @pytest.mark.parametrize(
        "options", [{}, {"soft_cap": 3.0}, {"num_heads": 6, "head_dim": 40}], ids=str
    )
    def test_paged_attention_to_all_keys(
        self, op: Callable[[str], Any], dtype: str, options: dict[str, Any]
    ) -> None:
        case = self.paged(self.CROSS, dtype, causal=False, **options)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    def test_paged_attention_to_all_keys_has_no_window(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        case = self.paged([(1, 40)], dtype, causal=False)
        windowed = replace(case, options={**case.options, "sliding_window": 8})
        with pytest.raises(ConfigError, match="sliding_window = 8"):
            windowed.run(op("paged_attention"))

    def test_paged_attention_to_all_keys_is_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        """In a batch, alone, one token after the other: the same bits."""
        attention = invariant_op("paged_attention")
        case = self.paged(self.CROSS, dtype, causal=False)
        together = case.run(attention)
        for b in range(len(case.seq_lens)):
            start, end = int(case.cu_seqlens_q[b]), int(case.cu_seqlens_q[b + 1])
            whole = case.request(b)
            assert bits_equal(whole.run(attention), together[start:end]), f"request {b}"
            for i in range(end - start):
                one = replace(whole.request(0, i, i + 1), seq_lens=whole.seq_lens)
                assert bits_equal(one.run(attention), together[start + i : start + i + 1])

    def test_paged_attention_of_nothing(self, op: Callable[[str], Any], dtype: str) -> None:
        case = self.paged([], dtype)
        assert case.run(op("paged_attention")).shape == (0, 4, 64)
        case = self.paged([(0, 5), (2, 7), (0, 0)], dtype)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    def test_paged_attention_that_sees_nothing_is_zero(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        case = self.paged([(3, 20)], dtype)
        short = replace(case, seq_lens=torch.full_like(case.seq_lens, 1))  # positions -2, -1, 0
        out = short.run(op("paged_attention"))
        assert (out[:2] == 0).all()
        self.check(out, short.expected(), dtype)

    OPTIONS: ClassVar = [
        {},
        {"sliding_window": 20},
        {"sliding_window": 70},  # wider than most kernels' tiles
        {"attention_chunk": 24},
        {"alibi": True},
        {"prefix": 5},
        {"soft_cap": 5.0},
        {"soft_cap": 5.0, "with_logit_scale": True},
        {"num_heads": 8, "num_kv_heads": 1, "with_logit_scale": True},
        {"num_heads": 8, "num_kv_heads": 1},
        {"num_heads": 3, "num_kv_heads": 3, "head_dim": 40, "block_size": 8},
    ]

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_paged_attention_does_not_depend_on_the_batch(
        self, invariant_op: Callable[[str], Any], dtype: str, options: dict[str, Any]
    ) -> None:
        attention = invariant_op("paged_attention")
        case = self.paged([*self.MIXED, (70, 133), (1, 300)], dtype, **options)
        together = case.run(attention)
        for b in range(len(case.seq_lens)):
            start, end = int(case.cu_seqlens_q[b]), int(case.cu_seqlens_q[b + 1])
            alone = case.request(b).run(attention)
            assert bits_equal(alone, together[start:end]), f"request {b} differs in the batch"

    LONG: ClassVar = [(1, 1400), (70, 1100), (3, 1030), (1, 513), (40, 40)]

    @pytest.mark.parametrize(
        "options", [{}, {"sliding_window": 600}, {"attention_chunk": 600}, {"alibi": True}], ids=str
    )
    def test_paged_attention_over_a_long_context(
        self, op: Callable[[str], Any], dtype: str, options: dict[str, Any]
    ) -> None:
        """Kernels may cut a long context into parts; enough rows for every size of tile."""
        case = self.paged(self.LONG, dtype, **options)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    @pytest.mark.parametrize("stored_as", [None, *ONE_BYTE_CACHES])
    def test_paged_attention_over_a_long_context_is_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str, stored_as: str | None
    ) -> None:
        """In a batch, alone, in chunks, one by one: the same bits across the parts of a context."""
        if stored_as is not None and stored_as not in self.cache_dtypes:
            pytest.skip(f"caches of {stored_as} are not among this class's")
        attention = invariant_op("paged_attention")
        scales = {} if stored_as is None else self.cache_scales(2)
        case = self.paged(self.LONG, dtype, cache_dtype=stored_as, **scales)
        together = case.run(attention)
        for b in range(len(case.seq_lens)):
            start, end = int(case.cu_seqlens_q[b]), int(case.cu_seqlens_q[b + 1])
            assert bits_equal(case.request(b).run(attention), together[start:end])
            for cut in range(0, end - start, 9):
                row = case.request(b, cut, cut + 1).run(attention)
                assert bits_equal(row, together[start + cut : start + cut + 1])
        parts = [case.request(1, first, last) for first, last in [(0, 5), (5, 29), (29, 70)]]
        in_three = torch.cat([part.run(attention) for part in parts])
        assert bits_equal(in_three, together[1:71]), "chunks change bits"

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"sinks": True},
            {"sliding_window": 600},
            {"attention_chunk": 600},
            {"alibi": True},
            {"prefix": 5},
            {"with_logit_scale": True},
            {"num_heads": 8, "num_kv_heads": 1},
        ],
        ids=str,
    )
    def test_paged_attention_of_a_shared_prefix(
        self, invariant_op: Callable[[str], Any], dtype: str, options: dict[str, Any]
    ) -> None:
        """Requests whose tables begin with the same blocks: together and alone the same bits."""
        attention = invariant_op("paged_attention")
        if "sinks" in options:
            options = {"sinks": self.rand(4, dtype=dtype)}
        shared = [(1400, 88), (1030, 64), (1024, 64), (513, 32), (1100, 66), (1200, 66), (700, 31)]
        lengths = [(1, length) for length, _ in shared] + [(3, 1100), (1, 1100), (1, 40), (1, 600)]
        case = self.paged(lengths, dtype, **options)
        # Their tables begin with the null block.
        window = "sliding_window" in options or "attention_chunk" in options
        for b, (_, blocks) in enumerate([*shared, (1100, 64), (1100, 64)]):
            if b and not window:
                case.block_table[b, :blocks] = case.block_table[0, :blocks]
        together = case.run(attention)
        self.check(together, case.expected(), dtype)
        for b in range(len(lengths)):
            start, end = int(case.cu_seqlens_q[b]), int(case.cu_seqlens_q[b + 1])
            assert bits_equal(case.request(b).run(attention), together[start:end]), f"request {b}"

    def test_paged_attention_looks_at_no_later_value(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        """A value that is not finite reaches only rows that see it."""
        attention = invariant_op("paged_attention")
        case = self.paged([(33, 70), (5, 9), (40, 600)], dtype)
        before = case.run(attention)
        for b, row, last in [(0, 20, 33), (1, 3, 38), (2, 30, 78)]:
            place = int(case.seq_lens[b]) - (last - int(case.cu_seqlens_q[b])) + row
            block = int(case.block_table[b, place // 16])
            case.value_cache[block, place % 16] = torch.inf
            case.key_cache[block, place % 16] = torch.nan
            after, first = case.run(attention), int(case.cu_seqlens_q[b])
            assert bits_equal(after[first : first + row], before[first : first + row])
            assert after[first + row : last].isnan().all()

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_paged_attention_does_not_depend_on_chunks(
        self, invariant_op: Callable[[str], Any], dtype: str, options: dict[str, Any]
    ) -> None:
        attention = invariant_op("paged_attention")
        case = self.paged([(83, 140)], dtype, **options)
        whole = case.run(attention)
        for cut in (1, 2, 7, 16, 31, 32, 33, 64, 82):
            parts = [case.request(0, 0, cut), case.request(0, cut)]
            in_two = torch.cat([part.run(attention) for part in parts])
            assert bits_equal(in_two, whole), f"a cut after {cut} changes bits"
        one_by_one = [case.request(0, i, i + 1).run(attention) for i in range(83)]
        assert bits_equal(torch.cat(one_by_one), whole), "decode differs from prefill"
