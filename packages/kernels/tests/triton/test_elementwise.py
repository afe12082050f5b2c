"""Gates, sums of vectors and what is scaled by a row's moments, in half precision against the reference;
in float32 the suite of core does that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headrace_reference as reference
from headrace_core.errors import ConfigError
from headrace_core.ops import OPENINGS
from headrace_kernels.triton import activations, elementwise, norms
from headrace_kernels.triton.head_linear import HeadLinear
from headrace_kernels.triton.moe import ExpertLinear, MoE
from headrace_reference.gaussian_topk import gaussian_topk
from headrace_reference.match_rms import match_rms
from headrace_reference.mix import mix
from headrace_reference.xielu import xielu
from headrace_testing.attention.backends import assert_near
from headrace_testing.ops import rand

pytestmark = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def wide(x: Tensor) -> Tensor:
    return x.cpu().double()


@pytest.mark.parametrize("activation", [None, *OPENINGS])
@pytest.mark.parametrize("gates", [1, 4, 1200])
def test_gate(device: str, dtype: str, activation: str | None, gates: int) -> None:
    x, gate = rand(3, 1200, dtype=dtype, device=device), rand(3, gates, dtype=dtype, device=device)
    out = elementwise.gate(x, gate, activation=activation)
    assert_near(out, reference.gate(wide(x), wide(gate), activation=activation), dtype)


def test_a_gate_that_there_is_not(device: str, dtype: str) -> None:
    x = rand(1, 8, dtype=dtype, device=device)
    with pytest.raises(ConfigError, match="'tanh': must be one of"):
        elementwise.gate(x, x, activation="tanh")


@pytest.mark.parametrize("gates", [0, 3, 16])
def test_gates_that_do_not_divide_a_row(device: str, dtype: str, gates: int) -> None:
    x, gate = rand(2, 8, dtype=dtype, device=device), rand(2, gates, dtype=dtype, device=device)
    with pytest.raises(ConfigError, match=rf"x is \[2, 8\], gate is \[2, {gates}\]"):
        elementwise.gate(x, gate)


@pytest.mark.parametrize("has_residual", [False, True])
def test_mix(device: str, dtype: str, has_residual: bool) -> None:
    x, weights = rand(2, 3, 1200, dtype=dtype, device=device), rand(2, 4, 3, device=device)
    residual = rand(2, 4, 1200, dtype=dtype, device=device) if has_residual else None
    expected = mix(
        wide(x), wide(weights), None if residual is None else wide(residual)
    )  # fmt: skip
    assert_near(elementwise.mix(x, weights, residual), expected, dtype)


def test_moments_of_rows(device: str, dtype: str) -> None:
    x, like = rand(3, 2 * 70, dtype=dtype, device=device).chunk(2, dim=1)
    expected = match_rms(wide(x), wide(like), 1e-5)
    assert_near(norms.match_rms(x, like, 1e-5), expected, dtype)
    expected = gaussian_topk(wide(x), 0.6)
    assert_near(norms.gaussian_topk(x, 0.6), expected, dtype)


def test_xielu(device: str, dtype: str) -> None:
    x = rand(3, 700, dtype=dtype, device=device) * 4
    assert_near(activations.xielu(x, 0.8, 0.9), xielu(wide(x), 0.8, 0.9), dtype)


def test_head_linear(device: str, dtype: str) -> None:
    x = rand(5, 3, 90, dtype=dtype, device=device)[..., 10:]
    weight, op = rand(3, 70, 80, dtype=dtype, device=device) / 9, HeadLinear()
    expected = torch.einsum("thk,hnk->thn", wide(x), wide(weight))
    assert_near(op(x, op.pack(weight)), expected, dtype)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("summed", [False, True])
def test_expert_linear(device: str, dtype: str, own: bool, summed: bool) -> None:
    weights, ids = rand(5, 4, device=device).softmax(-1).topk(2)
    x = rand(5, 2, 40, dtype=dtype, device=device)
    x = x if own else x[:, 0]
    weight, op = rand(4, 70, 40, dtype=dtype, device=device) / 6, ExpertLinear()
    by = weights if summed else None
    packed = reference.expert_linear.pack(wide(weight))
    expected = reference.expert_linear(
        wide(x), packed, ids.cpu(), None if by is None else wide(by)
    )  # fmt: skip
    assert_near(op(x, op.pack(weight), ids, by), expected, dtype)


def test_experts_that_give_back_what_they_get(device: str, dtype: str) -> None:
    weights, ids = rand(5, 4, device=device).softmax(-1).topk(2)
    x, op = rand(5, 40, dtype=dtype, device=device), MoE()
    matrices = [
        rand(*shape, dtype=dtype, device=device) / 6 for shape in ((2, 32, 40), (2, 40, 16))
    ]
    packed = reference.moe.pack(*map(wide, matrices))
    for by in (None, weights):
        out = op(x, op.pack(*matrices), by, ids, "silu", identities=2, identity_scale=0.5)
        expected = reference.moe(
            wide(x), packed, None if by is None else wide(by), ids.cpu(), "silu", identities=2,
            identity_scale=0.5,
        )  # fmt: skip
        assert_near(out, expected, dtype)
