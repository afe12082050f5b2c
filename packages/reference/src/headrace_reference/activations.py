"""Elementwise activations, plain and gated."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import CLAMPED_SWIGLU_ALPHA, CLAMPED_SWIGLU_LIMIT
from headrace_reference.dtypes import unset_like, widened


def activation(x: Tensor, kind: str) -> Tensor:
    """See :class:`headrace_core.ops.ActivationOp`.

    Raises:
        ConfigError: kind is not one of :data:`headrace_core.ops.ACTIVATIONS`.
    """
    return _function(kind)(widened(x)).to(x.dtype)


def fake_activation(x: Tensor, kind: str) -> Tensor:
    return unset_like(x)


def activation_and_mul(x: Tensor, kind: str) -> Tensor:
    """See :class:`headrace_core.ops.ActivationAndMulOp`.

    Raises:
        ConfigError: kind is not one of :data:`headrace_core.ops.GATED_ACTIVATIONS`.
    """
    gate, up = widened(x).chunk(2, dim=-1)
    if kind == "clamped_swiglu":
        return _clamped_swiglu(gate, up).to(x.dtype)
    return (_function(kind)(gate) * up).to(x.dtype)


def fake_activation_and_mul(x: Tensor, kind: str) -> Tensor:
    return unset_like(x, *x.shape[:-1], x.shape[-1] // 2)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    limit = CLAMPED_SWIGLU_LIMIT
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(CLAMPED_SWIGLU_ALPHA * gate)


def _relu2(x: Tensor) -> Tensor:
    return torch.relu(x).square()


_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": torch.relu,
    "relu2": _relu2,
}


def _function(kind: str) -> Callable[[Tensor], Tensor]:
    try:
        return _FUNCTIONS[kind]
    except KeyError:
        raise ConfigError(
            f"activation kind {kind!r} is unknown; kinds are {list(_FUNCTIONS)}"
        ) from None
