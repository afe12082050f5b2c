"""Masks and modules are known by what they answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace_core.errors import UnsupportedModel
from headrace_models.transformers_backend.likeness import gated_mlp_like, rms_norm_like
from headrace_models.transformers_backend.masks import MaskFacts, read_mask

pytestmark = pytest.mark.spec("MODEL-TRANSFORMERS-BACKEND")


@pytest.mark.parametrize(
    ("function", "facts"),
    [
        (lambda b, h, q, k: k <= q, MaskFacts(True)),
        (lambda b, h, q, k: torch.ones_like(q + k, dtype=torch.bool), MaskFacts(False)),
        (lambda b, h, q, k: (k <= q) & (q - k < 5), MaskFacts(True, window=5)),
        (lambda b, h, q, k: (k <= q) & (q - k < 1), MaskFacts(True, window=1)),
        (lambda b, h, q, k: (k <= q) & (q - k < 64), MaskFacts(True)),
        (lambda b, h, q, k: (q - k).abs() < 4, MaskFacts(False, window=4)),
        (lambda b, h, q, k: (k <= q) & (k // 7 == q // 7), MaskFacts(True, chunk=7)),
    ],
)
def test_masks(function: Any, facts: MaskFacts) -> None:
    """Of 64 tokens, among which a window of 64 is none."""
    found = read_mask(function, 64)
    assert found == facts or (facts.window == 1 and found == MaskFacts(True, chunk=1))


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: (k <= q) & ((k % 2 == 0) | (k == q)),
        lambda b, h, q, k: (k <= q) & (k > 2),
        lambda b, h, q, k: (k <= q) | (k == 5),
        lambda b, h, q, k: (k <= q) & torch.zeros(6, dtype=torch.bool)[k],
    ],
)
def test_masks_that_nobody_here_knows(function: Any) -> None:
    with pytest.raises(UnsupportedModel, match="mask"):
        read_mask(function, 64)


class _Norm(nn.Module):
    def __init__(self, offset: float = 0.0, power: int = 2, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(12, device="meta"))
        if bias:
            self.bias = nn.Parameter(torch.empty(12, device="meta"))
        self.eps, self.offset, self.power = 1e-5, offset, power

    def forward(self, x: Tensor) -> Tensor:
        size = x.abs().pow(self.power).mean(-1, keepdim=True)
        return x * (size + self.eps) ** (-1 / self.power) * (self.weight + self.offset)


def test_norms() -> None:
    assert rms_norm_like(_Norm()) == (1e-5, 0.0)
    assert rms_norm_like(_Norm(offset=1.0)) == (1e-5, 1.0)
    for other in (_Norm(offset=0.5), _Norm(power=1), _Norm(bias=True), nn.Embedding(3, 4)):
        assert rms_norm_like(other) is None


class _MLP(nn.Module):
    def __init__(self, act: Any, inner: Any = None) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 8)
        self.act, self.inner = act, inner

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.gate(x)) * self.up(x)
        return self.down(h if self.inner is None else self.inner(h))


def test_gated_mlps() -> None:
    names = ("gate", "up", "down")
    assert gated_mlp_like(_MLP(nn.functional.silu), *names) == "silu"
    assert gated_mlp_like(_MLP(nn.GELU(approximate="tanh")), *names) == "gelu_tanh"
    assert gated_mlp_like(_MLP(torch.tanh), *names) is None
    assert gated_mlp_like(_MLP(nn.functional.silu, nn.LayerNorm(6)), *names) is None
    assert gated_mlp_like(_MLP(nn.functional.silu), "up", "gate", "down") is None
