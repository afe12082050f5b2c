"""Integers of a few bits in 32-bit words, as most formats of integers pack them.

A row of words is one run of bits, lowest bit of the lowest word first; values follow each other without
gaps, and may straddle words (3 bits: 32 values in three words).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

WIDTHS = (2, 3, 4, 8)
"""Numbers of bits that :func:`unpack_rows` reads."""


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """words [R, W] int32 -> values [R, 32 W / bits] uint8."""
    return unpack_octets(words.contiguous().view(torch.uint8), bits)


def unpack_octets(octets: Tensor, bits: int) -> Tensor:
    """octets [R, C] uint8 -> values [R, 8 C / bits] uint8, of any width up to 8."""
    rows, mask = octets.shape[0], (1 << bits) - 1
    if bits == 8:
        return octets
    if 8 % bits:
        runs = octets.reshape(rows, -1, bits).long()  # eight values each
        run = sum((runs[..., i] << 8 * i for i in range(bits)), torch.zeros_like(runs[..., 0]))
        return torch.stack([(run >> bits * i) & mask for i in range(8)], -1).view(rows, -1).byte()
    return torch.stack([(octets >> s) & mask for s in range(0, 8, bits)], -1).view(rows, -1)


def words_for(values: int, bits: int) -> int:
    """Words that so many values take; -1: they do not end with a word."""
    return -1 if values * bits % 32 else values * bits // 32


def signed(values: Tensor, bits: int) -> Tensor:
    """values uint8 within [0, 2 ** bits) -> int8, less half of the range of the kernels' integers.

    Seven bits are held in eight, see :func:`held_bits`.
    """
    half = 1 << (held_bits(bits) - 1)
    return (values.short() - half).to(torch.int8)


def held_bits(bits: int) -> int:
    """Bits in which the kernels hold integers of so many."""
    return 8 if bits == 7 else bits
