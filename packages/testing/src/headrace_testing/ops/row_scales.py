"""Caches with a scale for each row: written, and attended to, as a quantization of keys and values.

What is expected comes from :func:`quantized` and :func:`numbers`, written apart from the reference: a
shared mistake (two numbers of a byte swapped, another head's scale) would pass otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

from headrace_core.kv import ROW_SCALE_BYTES, FullAttentionSpec, KVCacheSpec, MLASpec
from headrace_core.ops import HeadNorm
from headrace_testing.ops.inputs import bits_equal
from headrace_testing.ops.mla import LENGTHS, LONG_LENGTHS, MLACase, mla_case, with_topk
from headrace_testing.ops.paged import PagedCase, moved, paged_case
from headrace_testing.ops.suite import OpSuite

STORAGES = {"int8": "int8_per_token_head", "uint8": "int4_per_token_head"}
"""torch dtypes of the cache -> storages of a spec."""
LARGEST = {"int8": 127, "uint8": 7}
"""The same -> the largest number that is stored."""


class Rows(NamedTuple):
    """Caches [..., D or D / 2] and the scales beside them."""

    codes: Tensor
    scales: Tensor


def quantized(x: Tensor, stored: str) -> Rows:
    """Rows x [..., D] of finite numbers as the codes -7 to 7 or -127 to 127, int8, and their scales [...]
    float32: the largest magnitude is the largest code."""
    largest = LARGEST[stored]
    scales = x.float().abs().amax(-1) / largest
    scales[scales == 0] = 1.0
    codes = torch.round(x.float() / scales.unsqueeze(-1)).to(torch.int8)
    return Rows(codes, scales)


def numbers(codes: Tensor) -> Tensor:
    """The codes of a cache as int8 [..., D]: those of a uint8 one number by number."""
    if codes.dtype == torch.int8:
        return codes
    out = torch.empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=torch.int8)
    bytes_ = codes.cpu().to(torch.int16)
    for at, nibble in ((0, bytes_ % 16), (1, bytes_ // 16)):
        out[..., at::2] = torch.where(nibble > 7, nibble - 16, nibble).to(torch.int8)
    return out.to(codes.device)


def packed(codes: Tensor, stored: str) -> Tensor:
    """int8 codes [..., D] as a cache of this dtype has them: dimension 2 i in a byte's low half."""
    if stored == "int8":
        return codes
    low, high = codes[..., 0::2].to(torch.int16) % 16, codes[..., 1::2].to(torch.int16) % 16
    return (low + 16 * high).to(torch.uint8)


def split_rows(rows: Tensor, spec: KVCacheSpec) -> Rows:
    """Bytes [..., S, ``row_width``] of a head's block: the numbers of all its rows, then their scales."""
    size, width = rows.shape[-2], spec.row_width - ROW_SCALE_BYTES
    memory = rows.flatten(-2)
    numbers = torch.unflatten(memory[..., : size * width], -1, (size, width))
    return Rows(numbers[..., : spec.row_numbers], memory[..., size * width :].view(torch.float32))


def empty_rows(blocks: int, size: int, heads: int, dim: int, stored: str) -> tuple[Rows, Rows]:
    """Caches of keys and values as an engine lays them: the tokens of a head side by side, their scales
    behind. Numbers are 99, scales NaN."""
    spec = FullAttentionSpec(size, heads, dim, STORAGES[stored])
    memory = torch.full((blocks, 2, heads, size, spec.row_width), 99, dtype=torch.uint8)
    codes, scales = split_rows(memory.view(getattr(torch, stored)), spec)
    scales.fill_(torch.nan)
    keys, values = (Rows(codes[:, i].transpose(1, 2), scales[:, i].transpose(1, 2)) for i in (0, 1))
    return keys, values


def rows_of(cache: Tensor, into: Rows, stored: str, device: str) -> tuple[Tensor, Rows]:
    """Fills ``into`` with a plain cache [N, S, Hk, D], whose slots that nobody owns are NaN. Returns the
    cache with what is stored, in float64, and ``into`` on the device."""
    owned = ~cache.isnan().any(-1)
    rows = quantized(cache[owned], stored)
    into.codes[owned], into.scales[owned] = packed(rows.codes, stored), rows.scales
    exact = torch.full(cache.shape, torch.nan, dtype=torch.float64)
    exact[owned] = rows.codes.double() * rows.scales.double().unsqueeze(-1)
    whole = torch.as_strided(into.codes, (into.codes.untyped_storage().nbytes(),), (1,), 0)
    there = moved(whole, device)
    codes = there.as_strided(into.codes.shape, into.codes.stride(), into.codes.storage_offset())
    floats = there.view(torch.float32)
    scales = floats.as_strided(
        into.scales.shape, into.scales.stride(), into.scales.storage_offset()
    )
    return exact, Rows(codes, scales)


class RowScaledCase(NamedTuple):
    """A call over a cache with scales, and the same over the float64 numbers that it stands for."""

    case: PagedCase
    exact: PagedCase


def row_scaled_case(
    lengths: Sequence[tuple[int, int]],
    stored: str,
    *,
    dtype: str,
    device: str = "cpu",
    **options: Any,
) -> RowScaledCase:
    """:func:`~headrace_testing.ops.paged.paged_case` over a cache with a scale for each row."""
    plain = paged_case(lengths, dtype=dtype, device=device, **options)
    keys, values = plain.key_cache.cpu().contiguous(), plain.value_cache.cpu().contiguous()
    # Heads and tokens of very different sizes, so that no other row's scale will do.
    tokens = (1 + torch.arange(keys.shape[1]) % 5)[:, None, None] / 5
    sizes = 2 * torch.logspace(-1, 0, keys.shape[2])[:, None] * tokens
    keys, values = (keys * sizes).to(keys.dtype), (values * sizes).to(values.dtype)
    blocks, size, heads, dim = keys.shape
    own = empty_rows(blocks, size, heads, dim, stored)
    exact_keys, key_rows = rows_of(keys, own[0], stored, device)
    exact_values, value_rows = rows_of(values, own[1], stored, device)
    scales = {"k_scale": key_rows.scales, "v_scale": value_rows.scales}
    return RowScaledCase(
        replace(
            plain,
            key_cache=key_rows.codes,
            value_cache=value_rows.codes,
            options={**plain.options, **scales},
        ),
        replace(plain, key_cache=exact_keys, value_cache=exact_values),
    )


def row_scaled_latents(case: MLACase, stored: str) -> tuple[MLACase, MLACase]:
    """A case over a cache with two scales for each token, and the same over what it stands for."""
    cache, latent = case.cache.cpu(), case.query.shape[-1]
    cache = torch.cat((cache[..., :latent] / 2, cache[..., latent:] * 2), dim=-1).to(cache.dtype)
    blocks, size, width = cache.shape
    spec = MLASpec(size, 1, width, STORAGES[stored])
    apart = case.cache.stride(0) // (size * width)
    memory = torch.full((blocks, apart, size, spec.row_width), 99, dtype=torch.uint8)
    memory = memory.to(case.cache.device)[:, 0]
    scales = memory[..., -2 * ROW_SCALE_BYTES :].view(torch.float32)
    codes = memory[..., : spec.row_numbers].view(getattr(torch, stored))
    scales.fill_(torch.nan)
    owned = ~cache.isnan().any(-1)
    exact = torch.full(cache.shape, torch.nan, dtype=torch.float64)
    parts = torch.split(cache[owned], [latent, width - latent], dim=-1)
    found = [quantized(part, stored) for part in parts]
    exact[owned] = torch.cat([r.codes.double() * r.scales.double()[:, None] for r in found], dim=-1)
    owned = owned.to(codes.device)
    codes[owned] = packed(torch.cat([r.codes for r in found], dim=-1), stored).to(codes.device)
    scales[owned] = torch.stack([r.scales for r in found], dim=-1).to(codes.device)
    return replace(case, cache=codes, k_scale=scales), replace(case, cache=exact)


class RowScaleConformance(OpSuite):
    """The ops of the cache where each row has its scale."""

    ROWS: ClassVar = [(1, 1), (1, 70), (5, 5), (17, 90), (3, 35), (1, 16), (1, 129), (9, 700)]

    @pytest.fixture(params=LARGEST)
    def stored(self, request: pytest.FixtureRequest) -> str:
        name: str = request.param
        if name not in self.row_scaled_dtypes:
            pytest.skip(f"rows of {name} with scales are not among this class's")
        return name

    def _row_tokens(self, rows: int, dim: int, dtype: str) -> tuple[Tensor, Tensor]:
        """key and value [rows, 3, dim], slices of one projection; rows of many sizes, one of zeros."""
        fused = self.rand(rows, 9, dim, dtype=dtype)
        fused *= torch.logspace(-4, 3, rows * 9).view(rows, 9, 1).to(fused)
        fused[1, 4] = fused[2, 7] = 0.0
        return fused[:, 3:6], fused[:, 6:9]

    def _row_slots(self, rows: int) -> Tensor:
        slots = (torch.arange(rows) * 11 + 5) % 48
        slots[3] = -1
        return slots.to(self.device)

    def _row_caches(self, dim: int, stored: str) -> tuple[Rows, Rows]:
        own = empty_rows(6, 8, 3, dim, stored)
        plain = torch.full((6, 8, 3, dim), torch.nan)
        keys, values = (rows_of(plain, rows, stored, self.device)[1] for rows in own)
        return keys, values

    def _write_rows(
        self, write: Callable[..., None], parts: Any, caches: tuple[Rows, Rows], slots: Tensor
    ) -> None:
        keys, values = caches
        write(*parts, keys.codes, values.codes, slots, k_scale=keys.scales, v_scale=values.scales)

    @pytest.mark.parametrize("dim", [8, 24, 64, 80, 128])
    def test_rows_are_written_with_their_scales(
        self, op: Callable[[str], Any], dtype: str, stored: str, dim: int
    ) -> None:
        """Bit for bit; what is between is left alone."""
        key, value = self._row_tokens(9, dim, dtype)
        slots, caches = self._row_slots(9), self._row_caches(dim, stored)
        self._write_rows(op("cache_write"), (key, value), caches, slots)
        for x, cache in zip((key, value), caches, strict=True):
            rows = quantized(x[slots >= 0].cpu(), stored)
            expected = empty_rows(6, 8, 3, dim, stored)[0]
            at = slots[slots >= 0].cpu() // 8, slots[slots >= 0].cpu() % 8
            expected.codes[at], expected.scales[at] = packed(rows.codes, stored), rows.scales
            assert bits_equal(cache.scales.cpu(), expected.scales)
            assert torch.equal(cache.codes.cpu(), expected.codes)

    def test_what_is_not_finite_stays_in_its_row(
        self, op: Callable[[str], Any], dtype: str, stored: str
    ) -> None:
        """NaN is 0, an infinity the largest number, the scale that of the rest."""
        key, value = (x.clone() for x in self._row_tokens(9, 24, dtype))
        slots = self._row_slots(9)
        clean, spoilt = self._row_caches(24, stored), self._row_caches(24, stored)
        self._write_rows(op("cache_write"), (key, value), clean, slots)
        bad = torch.tensor([torch.nan, torch.inf, -torch.inf]).to(key)
        key[5, 1, :3], value[5, 1, :3], value[6, 2] = bad, bad, torch.inf
        self._write_rows(op("cache_write"), (key, value), spoilt, slots)
        at = int(slots[5]) // 8, int(slots[5]) % 8
        largest = LARGEST[stored]
        rest = quantized(key[5, 1, 3:].cpu(), stored)
        row = numbers(spoilt[0].codes[at][1].cpu())
        assert row[:3].tolist() == [0, largest, -largest]
        assert torch.equal(row[3:], rest.codes)
        assert float(spoilt[0].scales[at][1]) == float(rest.scales)
        endless = int(slots[6]) // 8, int(slots[6]) % 8
        assert numbers(spoilt[1].codes[endless][2].cpu()).tolist() == [largest] * 24
        assert float(spoilt[1].scales[endless][2]) == 1.0
        for x, y in zip(clean, spoilt, strict=True):
            for rows in (x, y):
                for place, head in ((at, 1), (endless, 2)):
                    rows.codes[place][head], rows.scales[place][head] = 0, 0.0
            assert bits_equal(x.scales, y.scales)
            assert torch.equal(x.codes, y.codes)

    @pytest.mark.parametrize("dim", [24, 64, 128])
    @pytest.mark.parametrize("normed", [False, True])
    def test_rows_after_rotation(
        self, op: Callable[[str], Any], dtype: str, stored: str, dim: int, normed: bool
    ) -> None:
        """One pass gives what norm, rotation and write one after the other give."""
        key, value = self._row_tokens(9, dim, dtype)
        key, query = key.clone(), self.rand(9, 6, dim, dtype=dtype)
        positions, slots = torch.arange(9, device=self.device) * 5, self._row_slots(9)
        angles = torch.arange(50)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(self.device)
        one, two = self._row_caches(dim, stored), self._row_caches(dim, stored)
        turned_query, turned = query.clone(), key.clone()
        norm = None
        if normed:
            weights = self.rand(2, dim, dtype=dtype, seed=3)
            norm = HeadNorm(weights[0], weights[1], eps=1e-6)
            turned = op("rms_norm")(turned.contiguous(), weights[1], 1e-6)
        op("rotary")(turned_query, turned, positions, cos_sin, interleaved=False)
        self._write_rows(op("cache_write"), (turned, value), two, slots)
        op("rotary_cache_write")(
            query, key, value, positions, cos_sin, one[0].codes, one[1].codes, slots,
            head_norm=norm, k_scale=one[0].scales, v_scale=one[1].scales,
        )  # fmt: skip
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a.scales, b.scales, equal_nan=True, rtol=1e-5, atol=0)
            apart = (numbers(a.codes).int() - numbers(b.codes).int()).abs()
            assert int(apart.max()) <= 1
            assert float((apart > 0).float().mean()) < 0.01

    @pytest.mark.parametrize("dim", [40, 64, 128])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"num_heads": 6, "num_kv_heads": 3, "block_size": 8},
            {"sliding_window": 20, "soft_cap": 3.0},
            {"attention_chunk": 20, "alibi": True},
            {"causal": False},
        ],
        ids=str,
    )
    def test_attention_over_rows_with_scales(
        self, op: Callable[[str], Any], dtype: str, stored: str, dim: int, options: dict[str, Any]
    ) -> None:
        case, exact = row_scaled_case(
            self.ROWS, stored, dtype=dtype, device=self.device, head_dim=dim, **options
        )
        out = case.run(op("paged_attention"))
        self.check(out, exact.expected(), dtype)
        self.check(out, case.expected(), dtype)  # the reference reads the bytes alike

    def test_attention_with_all_else(
        self, op: Callable[[str], Any], dtype: str, stored: str
    ) -> None:
        sinks = self.rand(4, dtype=dtype)
        for options in ({"sinks": sinks, "prefix": 5}, {"sinks": sinks, "with_logit_scale": True}):
            if "with_logit_scale" in options and not self.logit_scale:
                continue
            case, exact = row_scaled_case(
                self.ROWS, stored, dtype=dtype, device=self.device, **options
            )
            self.check(case.run(op("paged_attention")), exact.expected(), dtype)

    def test_attention_over_rows_is_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str, stored: str
    ) -> None:
        """In a batch, alone, in chunks, one by one, with a shared prefix: the same bits."""
        attention = invariant_op("paged_attention")
        case, _ = row_scaled_case(
            [*LONG_LENGTHS, (1, 1100), (1, 1090)], stored, dtype=dtype, device=self.device
        )
        case.block_table[5:, :64] = case.block_table[0, :64]
        together = case.run(attention)
        for b in range(len(case.seq_lens)):
            start, end = int(case.cu_seqlens_q[b]), int(case.cu_seqlens_q[b + 1])
            assert bits_equal(case.request(b).run(attention), together[start:end]), b
            for cut in range(0, end - start, 9):
                row = case.request(b, cut, cut + 1).run(attention)
                assert bits_equal(row, together[start + cut : start + cut + 1]), (b, cut)

    @pytest.mark.parametrize(("latent", "rope"), [(40, 8), (512, 64)])
    def test_latents_are_written_with_two_scales(
        self, op: Callable[[str], Any], dtype: str, stored: str, latent: int, rope: int
    ) -> None:
        case = mla_case(
            [(1, 100)], dtype=dtype, device=self.device, latent_dim=latent, rope_dim=rope
        )
        scaled, _ = row_scaled_latents(case, stored)
        parts = [
            self.rand(9, latent, dtype=dtype),
            self.rand(9, rope, dtype=dtype, seed=1) * 500,
        ]
        parts[0][2] = 0.0
        slots = torch.tensor([3, -1, 100, 17, 16, -1, 5], device=self.device)
        assert scaled.k_scale is not None
        codes, scales = scaled.cache.clone(), scaled.k_scale.clone()
        op("mla_cache_write")(*parts, scaled.cache, slots, k_scale=scaled.k_scale)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                rows = [quantized(x[row].cpu(), stored) for x in parts]
                joined = torch.cat([r.codes for r in rows])
                codes[slot // 16, slot % 16] = packed(joined, stored).to(codes)
                scales[slot // 16, slot % 16] = torch.stack([r.scales for r in rows]).to(scales)
        assert torch.equal(scaled.cache, codes)
        assert bits_equal(scaled.k_scale, scales)

    @pytest.mark.parametrize("blocks_apart", [1, 3])
    @pytest.mark.parametrize(("latent", "rope"), [(40, 8), (512, 64), (34, 6)])
    def test_attention_over_latents_with_scales(
        self,
        op: Callable[[str], Any],
        dtype: str,
        stored: str,
        latent: int,
        rope: int,
        blocks_apart: int,
    ) -> None:
        case = mla_case(
            [*LENGTHS, (1, 700)], dtype=dtype, device=self.device, latent_dim=latent, rope_dim=rope,
            blocks_apart=blocks_apart, num_heads=7,
        )  # fmt: skip
        scaled, exact = row_scaled_latents(case, stored)
        out = scaled.run(op("mla_attention"))
        self.check(out, exact.expected(), dtype)
        self.check(out, scaled.expected(), dtype)
        some = with_topk(scaled, 20)
        expected = replace(exact, topk_indices=some.topk_indices).expected()
        self.check(some.run(op("mla_attention")), expected, dtype)

    def test_attention_over_latents_with_scales_is_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str, stored: str
    ) -> None:
        attention = invariant_op("mla_attention")
        plain = mla_case([*LENGTHS, *LONG_LENGTHS], dtype=dtype, device=self.device, num_heads=48)
        case, _ = row_scaled_latents(plain, stored)
        together = case.run(attention)
        for b in range(len(case.seq_lens)):
            start, end = int(case.cu_seqlens_q[b]), int(case.cu_seqlens_q[b + 1])
            assert bits_equal(case.request(b).run(attention), together[start:end]), b
            for cut in range(0, end - start, 9):
                row = case.request(b, cut, cut + 1).run(attention)
                assert bits_equal(row, together[start + cut : start + cut + 1]), (b, cut)
