"""Rotation and writing the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import headrace_reference as reference
from headrace_core.ops import HeadNorm
from headrace_testing.ops.inputs import bits_equal, call_wide_in_place, wide
from headrace_testing.ops.paged import empty_caches, moved
from headrace_testing.ops.suite import OpSuite


class CacheConformance(OpSuite):
    """``rotary``, ``cache_write`` and both in one pass."""

    ROTATIONS: ClassVar = [(64, 64, False), (64, 64, True), (40, 16, False), (24, 6, True),
                           (80, 80, False), (128, 32, False)]  # fmt: skip
    """(D, R, interleaved)."""

    def _cos_sin(self, rotary_dim: int, num_positions: int = 50) -> Tensor:
        inverse = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
        angles = torch.arange(num_positions)[:, None] * inverse
        return torch.cat([angles.cos(), angles.sin()], dim=1).to(self.device)

    def _fused(
        self, rows: int, heads: int, kv_heads: int, dim: int, dtype: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """query, key and value as slices of one projection."""
        fused = self.rand(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
        parts = torch.split(fused, [heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        query, key, value = (torch.unflatten(x, 1, (x.shape[1] // dim, dim)) for x in parts)
        return query, key, value

    @pytest.mark.parametrize(("dim", "rotary_dim", "interleaved"), ROTATIONS)
    @pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
    def test_rotary(
        self,
        op: Callable[[str], Any],
        dtype: str,
        dim: int,
        rotary_dim: int,
        interleaved: bool,
        heads: int,
        kv_heads: int,
    ) -> None:
        cos_sin = self._cos_sin(rotary_dim)
        for rows in (0, 1, 7):
            query, key, value = self._fused(rows, heads, kv_heads, dim, dtype)
            positions = (torch.arange(rows) * 11 % 50).to(self.device)
            wide_query, wide_key, before = wide(query), wide(key), value.clone()
            op("rotary")(query, key, positions, cos_sin, interleaved=interleaved)
            call_wide_in_place(
                reference.rotary, wide_query, wide_key, positions, cos_sin, interleaved=interleaved
            )
            self.check(query, wide_query, dtype)
            self.check(key, wide_key, dtype)
            assert bits_equal(value, before), "the neighbour in the fused projection changed"

    @pytest.mark.parametrize("layout", ["NHD", "HND", "pair"])
    @pytest.mark.parametrize("block_size", [1, 8, 16, 32])
    def test_cache_write(
        self, op: Callable[[str], Any], dtype: str, layout: str, block_size: int
    ) -> None:
        for rows in (0, 1, 9):
            _, key, value = self._fused(rows, 4, 2, 24, dtype)
            slots = self._slots(rows, 6 * block_size)
            mine = self._caches(6, block_size, 2, 24, layout, dtype)
            keys, values = mine[0].clone(), mine[1].clone()
            op("cache_write")(key, value, *mine, slots)
            reference.cache_write(key, value, keys, values, slots)
            assert bits_equal(mine[0], keys)
            assert bits_equal(mine[1], values)

    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    @pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
    def test_cache_write_of_one_byte(
        self, op: Callable[[str], Any], dtype: str, cache_dtype: str, layout: str, scaled: bool
    ) -> None:
        """Bit for bit what torch's casts give: large, tiny, halfway and non-finite values too."""
        _, key, value = self._fused(9, 4, 2, 24, dtype)
        key *= torch.logspace(-7, 5, 24, dtype=torch.float64).to(key)
        halves = torch.arange(-12, 12, dtype=torch.float64) * 2.0**-10
        value[0] = halves.to(value) + value.new_tensor(1.0)
        value[2] = halves.to(value)
        value[3, 0, :3] = value.new_tensor([torch.inf, -torch.inf, 0.0])
        scales = self.cache_scales(2) if scaled else {}
        slots = self._slots(9, 6 * 8)
        mine = self._caches(6, 8, 2, 24, layout, cache_dtype)
        expected = self._caches(6, 8, 2, 24, layout, cache_dtype)
        op("cache_write")(key, value, *mine, slots, **scales)
        reference.cache_write(key, value, *expected, slots, **scales)
        assert bits_equal(mine[0], expected[0])
        assert bits_equal(mine[1], expected[1])

    @pytest.mark.parametrize(("dim", "rotary_dim", "interleaved"), ROTATIONS)
    @pytest.mark.parametrize("norm", [None, 0.0, 1.0], ids=["no-norm", "norm", "offset-norm"])
    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    def test_rotary_cache_write(
        self,
        op: Callable[[str], Any],
        dtype: str,
        dim: int,
        rotary_dim: int,
        interleaved: bool,
        norm: float | None,
        layout: str,
    ) -> None:
        cos_sin = self._cos_sin(rotary_dim)
        head_norm = None
        if norm is not None:
            weights = self.rand(2, dim, dtype=dtype, seed=3)
            head_norm = HeadNorm(weights[0], weights[1], eps=1e-6, offset=norm)
        self._check_fused(op, dtype, dim, cos_sin, layout, interleaved, head_norm)

    def test_rotary_cache_write_without_rotation(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        self._check_fused(op, dtype, 40, None, "NHD", False, None)

    def _check_fused(
        self,
        op: Callable[[str], Any],
        dtype: str,
        dim: int,
        cos_sin: Tensor | None,
        layout: str,
        interleaved: bool,
        head_norm: HeadNorm | None,
    ) -> None:
        fused_op = op("rotary_cache_write")
        options = {"interleaved": interleaved, "head_norm": head_norm}
        for rows in (0, 1, 7):
            query, key, value = self._fused(rows, 6, 2, dim, dtype)
            positions = (torch.arange(rows) * 11 % 50).to(self.device)
            slots = self._slots(rows, 6 * 8)
            caches = self._caches(6, 8, 2, dim, layout, dtype)
            expected = [wide(x).clone() for x in (query, key, value, *caches)]
            value_before = value.clone()
            fused_op(query, key, value, positions, cos_sin, *caches, slots, **options)
            call_wide_in_place(
                reference.rotary_cache_write,
                *expected[:3], positions, cos_sin, *expected[3:], slots, **options,
            )  # fmt: skip
            self.check(query, expected[0], dtype)
            assert bits_equal(value, value_before)
            for actual, cache in zip(caches, expected[3:], strict=True):
                assert torch.equal(actual.isnan().cpu(), cache.isnan()), "a wrong slot was written"
                self.check(actual.nan_to_num(), cache.nan_to_num(), dtype)

    def test_rotary_cache_write_is_row_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        fused_op, dim = invariant_op("rotary_cache_write"), 40
        weights = self.rand(2, dim, dtype=dtype, seed=3)
        norm = HeadNorm(weights[0], weights[1], eps=1e-6)
        all_rows = self._fused(70, 6, 2, dim, dtype)
        cos_sin = self._cos_sin(dim, 70)

        def run(rows: Tensor) -> Tensor:
            query, key, value = (x[rows].clone() for x in all_rows)
            caches = self._caches(10, 8, 2, dim, "NHD", dtype)
            slots = rows + 8
            fused_op(query, key, value, rows, cos_sin, *caches, slots, head_norm=norm)
            written = [cache.flatten(0, 1)[slots] for cache in caches]
            return torch.cat([query, *written], dim=1)

        self.check_rows(torch.arange(70, device=self.device), run, "rotary_cache_write")

    def _slots(self, rows: int, num_slots: int) -> Tensor:
        """Distinct slots, every third one negative."""
        slots = torch.randperm(max(num_slots, rows), generator=torch.Generator().manual_seed(1))
        slots = slots[:rows]
        slots[slots >= num_slots] = -1
        slots[1::3] = -1
        return slots.to(self.device)

    def _caches(
        self, blocks: int, block_size: int, heads: int, dim: int, layout: str, dtype: str
    ) -> tuple[Tensor, Tensor]:
        caches = empty_caches(blocks, block_size, heads, dim, layout, dtype)
        return moved(caches[0], self.device), moved(caches[1], self.device)
