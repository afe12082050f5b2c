"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_reference.dtypes import widened


def rotary(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool
) -> None:
    """See :class:`headrace_core.ops.RotaryOp`."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # each [T, 1, R/2]
    for x in (query, key):
        _rotate(x, cos, sin, interleaved)


def fake_rotary(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool
) -> None:
    return None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Turn the first R dimensions of x [T, heads, D] in place."""
    turning = x[..., : 2 * cos.shape[-1]]
    wide = widened(turning)
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        turning.copy_(torch.stack(turned, dim=-1).flatten(-2))
    else:
        turning.copy_(torch.cat(turned, dim=-1))
