"""Inputs of ops, and comparing what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headrace_core.ops import HeadNorm


def rand(*shape: int, dtype: str = "float32", device: str = "cpu", seed: int = 0) -> Tensor:
    """Standard normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(getattr(torch, dtype)).to(device)


def wide(value: Any) -> Any:
    """Floating tensors as float64 on the CPU, everything else on the CPU as it is."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return value.double() if value.is_floating_point() else value
    if isinstance(value, HeadNorm):
        return replace(
            value, query_weight=wide(value.query_weight), key_weight=wide(value.key_weight)
        )
    return value


def call_wide(op: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """``op`` on :func:`wide` versions of its arguments."""
    return op(*map(wide, args), **{name: wide(value) for name, value in options.items()})


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Same shape, dtype and bits (NaN equals NaN, 0 differs from -0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    as_int = {1: torch.uint8, 4: torch.int32, 2: torch.int16, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(as_int), b.contiguous().view(as_int))


def call_wide_in_place(op: Callable[..., Any], *args: Any, **options: Any) -> None:
    """``op`` on the CPU in float64; float64 tensors among the arguments are the very ones given."""
    moved = [x if isinstance(x, Tensor) and x.dtype == torch.float64 else wide(x) for x in args]
    op(*moved, **{name: wide(value) for name, value in options.items()})
