"""Neighbouring patches joined into one vector: fewer vectors, each longer (Shi et al. 2016,
arXiv:1609.05158, backwards)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def joined(states: Tensor, side: int, factor: int) -> Tensor:
    """states [I, side * side, H] -> [I, side * side / factor ** 2, factor ** 2 * H]; row by row, also within
    a vector."""
    count, _, size = states.shape
    short = side // factor
    blocks = states.reshape(count, short, factor, short, factor, size).transpose(2, 3)
    return blocks.reshape(count, short * short, factor * factor * size)


def joined_grid(states: Tensor, rows: int, columns: int, factor: int) -> Tensor:
    """states [rows * columns, H] of one image -> [rows * columns / factor ** 2, factor ** 2 * H], in the
    order of :func:`joined`."""
    size = states.shape[-1]
    blocks = states.reshape(rows // factor, factor, columns // factor, factor, size)
    return blocks.transpose(1, 2).reshape(-1, factor * factor * size)
