"""Shape-only versions of every op: outputs of the right shape, dtype and device, content unset.

For compilers and memory planning; they work on meta tensors, read no data and change no input.
Names and signatures are those of :mod:`headrace_core.reference`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace_core.ops import PackedLinear
from headrace_core.reference.linear import Int8Linear, Linear
from headrace_core.reference.moe import MoE


def _like(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape or x.shape, dtype=x.dtype, device=x.device)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return _like(weight, ids.shape[0], weight.shape[1])


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    return _like(x)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    return _like(x), _like(x)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return _like(x)


def activation(x: Tensor, kind: str) -> Tensor:
    return _like(x)


def activation_and_mul(x: Tensor, kind: str) -> Tensor:
    return _like(x, *x.shape[:-1], x.shape[-1] // 2)


def rotary(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool
) -> None:
    return None


def cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    **options: Any,
) -> None:
    return None


def rotary_cache_write(*args: Any, **options: Any) -> None:
    return None


def paged_attention(query: Tensor, *args: Any, **options: Any) -> Tensor:
    return _like(query, *query.shape)


class _FakeLinear(Linear):
    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        return _like(x, x.shape[0], packed.out_features)


class _FakeInt8Linear(Int8Linear):
    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        return _like(x, x.shape[0], packed.out_features)


class _FakeMoE(MoE):
    def __call__(
        self, x: Tensor, packed: PackedLinear, topk_weights: Tensor, topk_ids: Tensor, kind: str
    ) -> Tensor:
        return _like(x, x.shape[0], packed.out_features)


linear = _FakeLinear()
int8_linear = _FakeInt8Linear()
moe = _FakeMoE()
