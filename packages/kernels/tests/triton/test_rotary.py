"""Rotation, alone and fused with head norm and cache write, against the reference."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import headrace_reference as reference
from headrace_core.ops import HeadNorm
from headrace_kernels.triton import rotary
from headrace_testing.attention.backends import assert_near

pytestmark = pytest.mark.keep(1)  # interpreted, a case takes up to seconds

POSITIONS = [3, 4, 5, 0, 49, 7]
SLOTS = [1, -1, 3, 15, 9, 8]


class Inputs(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def make_inputs(head_dim: int, dtype: torch.dtype, device: str) -> Inputs:
    """Slices of one fused projection; a fresh copy with equal values on each call."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(len(POSITIONS), 7, head_dim, generator=generator).to(dtype).to(device)
    return Inputs(fused[:, :3], fused[:, 3:5], fused[:, 5:])


def make_angles(size: int, device: str) -> torch.Tensor:
    angle = torch.arange(50)[:, None] * 10000.0 ** (-torch.arange(size // 2) / (size // 2))
    return torch.cat([angle.cos(), angle.sin()], dim=1).to(device)


def make_norm(head_dim: int, dtype: torch.dtype, device: str) -> HeadNorm:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(2, head_dim, generator=generator).to(dtype).to(device)
    return HeadNorm(weights[0], weights[1], eps=1e-6, offset=1.0)


SIZES = pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(16, 16), (32, 8), (20, 12), (24, 24)], ids=str
)
VNNI_ISAS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


@SIZES
@VNNI_ISAS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rotary(device: str, head_dim: int, rotary_dim: int, interleaved: bool, dtype: str) -> None:
    actual = make_inputs(head_dim, getattr(torch, dtype), device)
    expected = Inputs(*(x.double() for x in make_inputs(head_dim, getattr(torch, dtype), device)))
    positions, angles = torch.tensor(POSITIONS, device=device), make_angles(rotary_dim, device)
    rotary.rotary(actual.query, actual.key, positions, angles, interleaved=interleaved)
    reference.rotary(expected.query, expected.key, positions, angles, interleaved=interleaved)
    for one, other in zip(actual, expected, strict=True):
        assert_near(one, other, dtype)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (20, 12)], ids=str)
@VNNI_ISAS
@pytest.mark.parametrize("normed", [True, False], ids=["head norm", "no norm"])
@pytest.mark.parametrize("turned", [True, False], ids=["rotation", "no rotation"])
@pytest.mark.parametrize("dtype", ["float16"])
def test_rotary_cache_write(
    device: str,
    head_dim: int,
    rotary_dim: int,
    interleaved: bool,
    normed: bool,
    turned: bool,
    dtype: str,
) -> None:
    dtype_ = getattr(torch, dtype)
    positions, slots = torch.tensor(POSITIONS, device=device), torch.tensor(SLOTS, device=device)
    angles = make_angles(rotary_dim, device) if turned else None
    norm = make_norm(head_dim, dtype_, device) if normed else None
    results = []
    for op in (rotary.rotary_cache_write, reference.rotary_cache_write):
        inputs = make_inputs(head_dim, dtype_, device)
        cache = torch.zeros(4, 2, 2, 4, head_dim, dtype=dtype_, device=device)
        cache = cache.permute(1, 0, 3, 2, 4)  # (2, N, S, Hk, D) stored as (N, 2, Hk, S, D)
        op(
            *inputs, positions, angles, cache[0], cache[1], slots,
            interleaved=interleaved, head_norm=norm,
        )  # fmt: skip
        results.append((inputs.query, cache, inputs.value))
    (query, cache, value), (expected_query, expected_cache, expected_value) = results
    assert_near(query, expected_query.double(), dtype)
    assert_near(cache, expected_cache.double(), dtype)
    assert torch.equal(value, expected_value)
    assert torch.equal(cache[1], expected_cache[1]), "values are copied, not computed"


def test_fused_is_near_the_parts_in_bfloat16(device: str) -> None:
    """Interpreted stores cut bfloat16 off instead of rounding, so this one is not exact there."""
    positions, slots = torch.tensor(POSITIONS, device=device), torch.tensor(SLOTS, device=device)
    angles, norm = make_angles(16, device), make_norm(16, torch.bfloat16, device)
    inputs = make_inputs(16, torch.bfloat16, device)
    expected = Inputs(*(x.double() for x in make_inputs(16, torch.bfloat16, device)))
    cache = torch.zeros(2, 4, 4, 2, 16, dtype=torch.bfloat16, device=device)
    wide_cache = cache.double()
    options = {"interleaved": False, "head_norm": norm}
    rotary.rotary_cache_write(*inputs, positions, angles, cache[0], cache[1], slots, **options)
    reference.rotary_cache_write(
        *expected, positions, angles, wide_cache[0], wide_cache[1], slots, **options
    )
    torch.testing.assert_close(inputs.query.double(), expected.query, atol=4e-2, rtol=3e-2)
    torch.testing.assert_close(cache.double(), wide_cache, atol=4e-2, rtol=3e-2)


def test_no_tokens(device: str) -> None:
    inputs = Inputs(*(x[:0] for x in make_inputs(16, torch.float32, device)))
    none = torch.empty(0, dtype=torch.int64, device=device)
    cache = torch.zeros(2, 4, 4, 2, 16, device=device)
    rotary.rotary(inputs.query, inputs.key, none, make_angles(16, device), interleaved=False)
    rotary.rotary_cache_write(*inputs, none, make_angles(16, device), cache[0], cache[1], none)
    assert cache.count_nonzero() == 0
