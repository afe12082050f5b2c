"""Codes that a block of a GGUF file holds, and what is said of a type of blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Codes:
    """Numbers of n blocks."""

    values: Tensor
    """int8 [n, numbers of a block], with zero in the middle of their range."""
    scales: Tensor
    """float32 [n, groups of a block]."""
    minimums: Tensor | None = None
    """float32 [n, groups of a block]."""
    block_scales: Tensor | None = None
    """float32 [n, 1]."""
    block_minimums: Tensor | None = None
    """float32 [n, 1]."""


@dataclass(frozen=True, slots=True)
class CodeKind:
    """A type of blocks whose numbers are codes of a few bits."""

    elements: int
    """Numbers of a block."""
    num_bytes: int
    """Bytes of a block."""
    bits: int
    group_size: int
    codes: Callable[[Tensor], Codes]
    zero_point: int | None = None
    """Zero point of every group."""
    table: tuple[float, ...] | None = None
    """Numbers that the codes choose from, [2 ** bits]; the first is that of the lowest code. None: codes
    are the numbers."""
    kept_bytes: int | None = None
    """Bytes of a packed block, of types whose files have fewer; None: about ``num_bytes``."""


def halves(blocks: Tensor, start: int) -> Tensor:
    """The float16 at a byte of each block: float32 [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()
