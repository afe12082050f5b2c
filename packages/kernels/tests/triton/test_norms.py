"""RMS and layer norm against the reference in float64."""

from __future__ import annotations

import pytest
import torch

import headrace_reference as reference
from headrace_kernels.triton import norms
from headrace_testing.attention.backends import assert_near

SHAPES = [(1, 1), (3, 7), (5, 64), (2, 3, 100), (4, 1025), (0, 16)]


def random(shape: tuple[int, ...], dtype: str, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(getattr(torch, dtype)).to(device)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(device: str, shape: tuple[int, ...], offset: float, dtype: str) -> None:
    x, weight = random(shape, dtype, device), random(shape[-1:], dtype, device, 1)
    expected = reference.rms_norm(x.double(), weight.double(), 1e-6, offset=offset)
    out = norms.rms_norm(x, weight, 1e-6, offset=offset)
    assert out.dtype == x.dtype
    assert_near(out, expected, dtype)


def test_rms_norm_of_large_halves_does_not_overflow(device: str) -> None:
    x = torch.full((2, 64), 6e4, dtype=torch.float16, device=device)
    out = norms.rms_norm(x, torch.ones(64, dtype=torch.float16, device=device), 1e-6)
    torch.testing.assert_close(out, torch.ones_like(out), atol=1e-3, rtol=0)


def test_rms_norm_takes_strided_rows_and_float32_weights(device: str) -> None:
    x = random((6, 3 * 32), "float16", device)[:, 32:64]
    weight = random((32,), "float32", device, 1)
    expected = reference.rms_norm(x.double(), weight.double(), 1e-6)
    assert_near(norms.rms_norm(x, weight, 1e-6), expected, "float16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 64), (4, 1025), (0, 16)], ids=str)
def test_add_rms_norm(device: str, shape: tuple[int, ...], dtype: str) -> None:
    x, residual = random(shape, dtype, device), random(shape, dtype, device, 2)
    weight = random(shape[-1:], dtype, device, 1)
    out, total = norms.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    assert_near(total, x.double() + residual.double(), dtype)
    # The norm is of the rounded sum: exact inputs for it are what the kernel itself returned.
    assert_near(out, reference.rms_norm(total.double(), weight.double(), 1e-6), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm(device: str, shape: tuple[int, ...], has_bias: bool, dtype: str) -> None:
    x, weight = random(shape, dtype, device), random(shape[-1:], dtype, device, 1)
    bias = random(shape[-1:], dtype, device, 2) if has_bias else None
    wide_bias = None if bias is None else bias.double()
    expected = reference.layer_norm(x.double(), weight.double(), wide_bias, 1e-5)
    assert_near(norms.layer_norm(x, weight, bias, 1e-5), expected, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (4, 1025), (0, 16)], ids=str)
def test_add_layer_norm(device: str, shape: tuple[int, ...], dtype: str) -> None:
    x, residual = random(shape, dtype, device), random(shape, dtype, device, 2)
    weight, bias = random(shape[-1:], dtype, device, 1), random(shape[-1:], dtype, device, 3)
    out, total = norms.add_layer_norm(x.clone(), residual.clone(), weight, bias, 1e-5)
    assert_near(total, x.double() + residual.double(), dtype)
    expected = reference.layer_norm(total.double(), weight.double(), bias.double(), 1e-5)
    assert_near(out, expected, dtype)


def test_layer_norm_far_from_zero(device: str) -> None:
    """mean(x^2) - mean^2 would leave nothing of the variance here."""
    x = random((3, 64), "float32", device) + 1e4
    weight = torch.ones(64, device=device)
    expected = reference.layer_norm(x.double(), weight.double(), None, 1e-5)
    out = norms.layer_norm(x, weight, None, 1e-5)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=0)


def test_rows_do_not_depend_on_each_other(device: str) -> None:
    x, weight = random((9, 100), "float32", device), random((100,), "float32", device, 1)
    whole = norms.rms_norm(x, weight, 1e-6)
    assert all(torch.equal(norms.rms_norm(x[i : i + 1], weight, 1e-6)[0], whole[i]) for i in (0, 8))
