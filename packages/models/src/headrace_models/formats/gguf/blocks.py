"""Blocks of a GGUF file -> numbers.

Each function takes the blocks of one type, uint8 [n, bytes of a block], and gives float32
[n, numbers of a block]. Layouts: ggml's ``ggml-common.h``; all scales are float16 unless a comment
says otherwise, and every product is rounded once, in ggml's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

_NIBBLES = (0, 4)
_PAIRS = (0, 2, 4, 6)
_BITS = (0, 1, 2, 3, 4, 5, 6, 7)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Halves of an MXFP4 number's magnitude; its scale below is halved too."""


def dequantize(kind: str, blocks: Tensor) -> Tensor:
    """Numbers of blocks of one type.

    Args:
        kind: one of :data:`KINDS`.
        blocks: uint8 [n, bytes of a block].

    Returns:
        float32 [n, numbers of a block].
    """
    return KINDS[kind](blocks)


def _q4_0(blocks: Tensor) -> Tensor:
    scale, packed = _halves(blocks, 0), blocks[:, 2:]
    return scale * (_low_then_high(packed).to(torch.int8) - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    scale, least, packed = _halves(blocks, 0), _halves(blocks, 2), blocks[:, 4:]
    return scale * _low_then_high(packed) + least


def _q5_0(blocks: Tensor) -> Tensor:
    scale, high, packed = _halves(blocks, 0), blocks[:, 2:6], blocks[:, 6:]
    return scale * ((_low_then_high(packed) | _fifth_bits(high)).to(torch.int8) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    scale, least = _halves(blocks, 0), _halves(blocks, 2)
    high, packed = blocks[:, 4:8], blocks[:, 8:]
    return scale * (_low_then_high(packed) | _fifth_bits(high)) + least


def _q8_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * blocks[:, 2:].view(torch.int8)


def _q2_k(blocks: Tensor) -> Tensor:
    """Sixteen groups of 16: a scale and a least value of 4 bits each."""
    scales, packed = blocks[:, :16], blocks[:, 16:80]
    scale = (_halves(blocks, 80) * (scales & 15))[:, :, None]
    least = (_halves(blocks, 82) * (scales >> 4))[:, :, None]
    numbers = _shifted(packed.reshape(-1, 2, 1, 32), _PAIRS, 3).reshape(-1, 16, 16)
    return (scale * numbers - least).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    """Sixteen groups of 16 with scales of 6 bits; a number's third bit takes away 4 where it is off."""
    high, packed, scales = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    low_bits = _shifted(scales[:, None, :8], _NIBBLES, 15).reshape(-1, 16)
    high_bits = _shifted(scales[:, None, 8:], _PAIRS, 3).reshape(-1, 16)
    scale = _halves(blocks, 108) * ((low_bits | high_bits << 4).to(torch.int8) - 32)
    low = _shifted(packed.reshape(-1, 2, 1, 32), _PAIRS, 3).reshape(-1, 16, 16)
    off = 1 - _shifted(high[:, None, :], _BITS, 1).reshape(-1, 16, 16)
    numbers = low.to(torch.int8) - (off << 2).to(torch.int8)
    return (scale[:, :, None] * numbers).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    """Eight groups of 32: a scale and a least value of 6 bits each."""
    scale, least = _scales_and_leasts(blocks)
    numbers = _shifted(blocks[:, 16:].reshape(-1, 4, 1, 32), _NIBBLES, 15).reshape(-1, 8, 32)
    return (scale * numbers - least).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    scale, least = _scales_and_leasts(blocks)
    high = _shifted(blocks[:, None, 16:48], _BITS, 1)
    low = _shifted(blocks[:, 48:].reshape(-1, 4, 1, 32), _NIBBLES, 15).reshape(-1, 8, 32)
    return (scale * (low | high << 4) - least).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    """Sixteen groups of 16 with scales of 8 bits."""
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    low = _shifted(blocks[:, :128].reshape(-1, 2, 1, 64), _NIBBLES, 15).reshape(-1, 16, 16)
    high = _shifted(blocks[:, 128:192].reshape(-1, 2, 1, 32), _PAIRS, 3).reshape(-1, 16, 16)
    scale = (_halves(blocks, 208) * scales)[:, :, None]
    return (scale * ((low | high << 4).to(torch.int8) - 32)).flatten(1)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * _looked_up(_IQ4, _low_then_high(blocks[:, 2:]))


def _iq4_xs(blocks: Tensor) -> Tensor:
    """Eight groups of 32 with scales of 6 bits; numbers as in IQ4_NL."""
    low = _shifted(blocks[:, 4:8, None], _NIBBLES, 15).reshape(-1, 8)
    high = _shifted(blocks[:, 2:4, None], _PAIRS, 3).reshape(-1, 8)
    scale = _halves(blocks, 0) * ((low | high << 4).to(torch.int8) - 32)
    indices = _shifted(blocks[:, 8:].reshape(-1, 8, 1, 16), _NIBBLES, 15).reshape(-1, 8, 32)
    return (scale[:, :, None] * _looked_up(_IQ4, indices)).flatten(1)


def _mxfp4(blocks: Tensor) -> Tensor:
    """The scale is a power of two (E8M0)."""
    exponent = blocks[:, :1].to(torch.int32) - 128
    scale = torch.ldexp(torch.ones(exponent.shape), exponent)
    return scale * _looked_up(_E2M1, _low_then_high(blocks[:, 1:]))


def _scales_and_leasts(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K and Q5_K, [n, 8, 1] each: two float16, then twelve bytes that hold 16 times 6
    bits."""
    first, second, rest = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat([first & 63, (rest & 15) | ((first >> 2) & 48)], dim=1)
    leasts = torch.cat([second & 63, (rest >> 4) | ((second >> 2) & 48)], dim=1)
    scale, least = _halves(blocks, 0) * scales, _halves(blocks, 2) * leasts
    return scale[:, :, None], least[:, :, None]


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The float16 at a byte of each block: float32 [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _low_then_high(packed: Tensor) -> Tensor:
    """Two numbers of 4 bits a byte: first all low ones of the block, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=1)


def _fifth_bits(high: Tensor) -> Tensor:
    """32 bits of each block as 0 or 16: uint8 [n, 32]."""
    return _shifted(high[:, :, None], _BITS, 1).reshape(-1, 32) << 4


def _shifted(packed: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """``packed`` once for each shift, along its dimension of size 1."""
    axis = packed.shape.index(1, 1)
    sizes = [1] * packed.dim()
    sizes[axis] = len(shifts)
    return packed >> torch.tensor(shifts, dtype=torch.uint8).view(sizes) & mask


def _looked_up(table: tuple[int, ...], indices: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.float32)[indices.int()]


KINDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k,
    "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
