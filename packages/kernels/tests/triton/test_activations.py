"""Activations against the reference in float64."""

from __future__ import annotations

import pytest
import torch

import headrace_reference as reference
from headrace_core.errors import ConfigError
from headrace_core.ops import ACTIVATIONS, GATED_ACTIVATIONS
from headrace_kernels.triton import activations
from headrace_testing.attention.backends import assert_near

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's


def random(shape: tuple[int, ...], dtype: str, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).mul(3).to(getattr(torch, dtype)).to(device)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 5), (1500,), (0, 4)], ids=str)
def test_activation(device: str, shape: tuple[int, ...], kind: str, dtype: str) -> None:
    x = random(shape, dtype, device)
    out = activations.activation(x, kind)
    assert out.dtype == x.dtype
    assert_near(out, reference.activation(x.double(), kind), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", GATED_ACTIVATIONS)
@pytest.mark.parametrize("shape", [(3, 14), (2, 2100), (0, 4)], ids=str)
def test_activation_and_mul(device: str, shape: tuple[int, ...], kind: str, dtype: str) -> None:
    x = random(shape, dtype, device)
    out = activations.activation_and_mul(x, kind)
    assert_near(out, reference.activation_and_mul(x.double(), kind), dtype)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_far_values_saturate(device: str, kind: str) -> None:
    x = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], device=device)
    out = activations.activation(x, kind)
    torch.testing.assert_close(out, reference.activation(x, kind), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_nan_stays(device: str, kind: str) -> None:
    out = activations.activation(torch.tensor([1.0, float("nan")], device=device), kind)
    assert out.isnan().tolist() == [False, True]


def test_takes_strided_rows(device: str) -> None:
    x = random((4, 30), "float32", device)[:, 10:20]
    out = activations.activation_and_mul(x, "silu")
    assert_near(out, reference.activation_and_mul(x.double(), "silu"), "float32")


@pytest.mark.parametrize("op", [activations.activation, activations.activation_and_mul])
def test_unknown_kind_is_an_error(device: str, op: object) -> None:
    with pytest.raises(ConfigError, match="'swish' is unknown; kinds are"):
        op(torch.ones(2, 2, device=device), "swish")  # type: ignore[operator]
