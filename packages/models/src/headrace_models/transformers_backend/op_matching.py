"""Modules that compute what an op computes. They are asked, not known by name.

A copy of the module gets random weights and is called; if it answers as the op is defined, the op may
stand for it. What it is asked reaches from small numbers to large ones: a module may clamp.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
"""The op's name -> what it computes."""
_MAGNITUDES = torch.tensor([[1.0], [30.0], [1e4]])
"""Magnitudes of the rows that activations are tried on."""


class NormLike(NamedTuple):
    """Arguments of the op ``rms_norm``."""

    eps: float
    offset: float


def rms_norm_like(module: nn.Module) -> NormLike | None:
    """Norm that a module computes if it is an RMS norm with one weight; None: it is not."""
    own = dict(module.named_parameters(recurse=False))
    if list(own) != ["weight"] or own["weight"].dim() != 1 or any(True for _ in module.children()):
        return None
    size = own["weight"].shape[0]
    clone = copy.copy(module)
    weight = _random((size,), 1)
    clone._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    x = _random((3, size), 2) * torch.tensor([[1.0], [1e-3], [30.0]])
    answer = _call(clone, x)
    if answer is None:
        return None
    for eps in {v for v in vars(module).values() if isinstance(v, float)}:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        for offset in (0.0, 1.0):
            if _close(answer, normed * (weight + offset)):
                return NormLike(eps, offset)
    return None


def layer_norm_like(module: nn.Module) -> float | None:
    """The eps of a module that is a layer norm with a weight and no bias, else None."""
    own = dict(module.named_parameters(recurse=False))
    if list(own) != ["weight"] or own["weight"].dim() != 1 or any(True for _ in module.children()):
        return None
    size = own["weight"].shape[0]
    clone = copy.copy(module)
    weight = _random((size,), 9)
    clone._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    x = (_random((3, size), 10) + 2) * torch.tensor([[1.0], [1e-3], [30.0]])
    answer = _call(clone, x)
    if answer is None:
        return None
    for eps in {v for v in vars(module).values() if isinstance(v, float)}:
        if _close(answer, functional.layer_norm(x, (size,), weight, None, eps)):
            return eps
    return None


class BareNorm(NamedTuple):
    """A norm without a weight."""

    centred: bool
    """A layer norm, else an RMS norm."""
    eps: float


def bare_norm_like(module: nn.Module, hidden_size: int) -> BareNorm | None:
    """Norm that a module without weights and parts computes; None: it does not normalise.

    Args:
        hidden_size: a size that it takes if it does not take any.
    """
    if any(True for _ in module.children()) or module._parameters or module._buffers:
        return None
    for size in (12, hidden_size):
        x = (_random((3, size), 13) + 2) * torch.tensor([[1.0], [1e-2], [30.0]])
        answer = _call(module, x)
        if answer is None or answer.shape != x.shape:
            continue
        for eps in {1e-5, 1e-6, *(v for v in vars(module).values() if isinstance(v, float))}:
            if _close(answer, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)):
                return BareNorm(False, eps)
            if _close(answer, functional.layer_norm(x, (size,), None, None, eps)):
                return BareNorm(True, eps)
    return None


def activation_like(module: nn.Module) -> str | None:
    """The activation that a module without weights and parts is, else None."""
    if any(True for _ in module.children()) or module._parameters or module._buffers:
        return None
    x = _random((3, 35), 11) * _MAGNITUDES
    answer = _call(module, x)
    if answer is None:
        return None
    for kind, function in _ACTIVATIONS.items():
        if _close(answer, function(x)):
            return kind
    return None


def gated_mlp_like(module: nn.Module, gate: str, up: str, down: str) -> str | None:
    """The activation of a module that computes ``down(act(gate(x)) * up(x))``, else None."""
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    parts = (_random((6, 8), 4), _random((6, 8), 5), _random((8, 6), 6))
    for name, weight in zip((gate, up, down), parts):
        clone._modules[name] = _Matrix(weight)
    x = (_random((3, 8), 7) * _MAGNITUDES).unsqueeze(0)
    answer = _call(clone, x)
    if answer is None:
        return None
    opened, let = x @ parts[0].T, x @ parts[1].T
    for kind, function in _ACTIVATIONS.items():
        if _close_by_row(answer, (function(opened) * let) @ parts[2].T):
            return kind
    return None


def expert_gate_like(module: Any) -> str | None:
    """The activation of packed experts whose gate is ``act(first half) * second half``."""
    x = _random((3, 8), 8) * _MAGNITUDES
    answer = _call(module._apply_gate, x)
    if answer is None:
        return None
    for kind, function in _ACTIVATIONS.items():
        if _close(answer, function(x[:, :4]) * x[:, 4:]):
            return kind
    return None


def _close(answer: Tensor, expected: Tensor) -> bool:
    return answer.shape == expected.shape and torch.allclose(answer, expected, rtol=1e-5, atol=1e-6)


def _close_by_row(answer: Tensor, expected: Tensor) -> bool:
    """Each number within 1e-5 of its row's largest: sums may cancel."""
    if answer.shape != expected.shape:
        return False
    largest = expected.abs().amax(-1, keepdim=True)
    return bool(((answer - expected).abs() <= 1e-5 * largest).all())


class _Matrix(nn.Module):
    """A linear layer without a bias."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def _call(function: Callable[[Tensor], Any], x: Tensor) -> Tensor | None:
    """The answer; None if there is none, or one of another kind."""
    try:
        with torch.no_grad():
            answer = function(x)
    except Exception:  # the module wants something else than one tensor: it is no such thing
        return None
    real = isinstance(answer, Tensor) and answer.dtype == torch.float32 and not answer.is_meta
    return answer if real else None


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
