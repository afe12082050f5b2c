"""Blocks of a GGUF file -> codes, scales and minimums.

Each function takes the blocks of one type, uint8 [n, bytes of a block]. Layouts: ggml's ``ggml-common.h``;
all scales are float16 unless a comment says otherwise. What the codes mean:
:class:`headrace_core.ops.QuantizedWeight`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace_quant.gguf.codes import CodeKind, Codes, halves
from headrace_quant.gguf.vectors import VECTOR_KINDS

_NIBBLES = (0, 4)
_PAIRS = (0, 2, 4, 6)
_BITS = (0, 1, 2, 3, 4, 5, 6, 7)
_THIRDS = (1, 3, 9, 27, 81)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of 4 bits of MXFP4 and NVFP4, whose scales are halved for it."""


def dequantize(name: str, blocks: Tensor) -> Tensor:
    """Numbers of blocks of one type.

    Args:
        name: one of :data:`KINDS`.
        blocks: uint8 [n, bytes of a block].

    Returns:
        float32 [n, numbers of a block].
    """
    kind = KINDS[name]
    found = kind.codes(blocks)
    values = found.values.view(len(blocks), -1, kind.group_size)
    if kind.table is not None:
        table = torch.tensor(kind.table, dtype=torch.float32)
        real = table[values.int() + (1 << kind.bits - 1)]
    else:
        real = values.float() - (kind.zero_point or 0)
    real = real * found.scales[:, :, None]
    if found.block_scales is not None:
        real = real * found.block_scales[:, :, None]
    if found.minimums is not None:
        least = found.minimums
        if found.block_minimums is not None:
            least = least * found.block_minimums
        real = real - least[:, :, None]
    return real.flatten(1)


def _q4_0(blocks: Tensor) -> Codes:
    return Codes(_centred(_low_then_high(blocks[:, 2:]), 8), halves(blocks, 0))


def _q4_1(blocks: Tensor) -> Codes:
    values = _centred(_low_then_high(blocks[:, 4:]), 8)
    return Codes(values, halves(blocks, 0), -halves(blocks, 2))


def _q5_0(blocks: Tensor) -> Codes:
    numbers = _low_then_high(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return Codes(_centred(numbers, 16), halves(blocks, 0))


def _q5_1(blocks: Tensor) -> Codes:
    numbers = _low_then_high(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return Codes(_centred(numbers, 16), halves(blocks, 0), -halves(blocks, 2))


def _q8_0(blocks: Tensor) -> Codes:
    return Codes(blocks[:, 2:].contiguous().view(torch.int8), halves(blocks, 0))


def _q2_k(blocks: Tensor) -> Codes:
    """Sixteen groups of 16: a scale and a minimum of 4 bits each."""
    scales = blocks[:, :16]
    numbers = _shifted(blocks[:, 16:80].reshape(-1, 2, 1, 32), _PAIRS, 3).flatten(1)
    return Codes(
        _centred(numbers, 2),
        (scales & 15).float(),
        (scales >> 4).float(),
        halves(blocks, 80),
        halves(blocks, 82),
    )


def _q3_k(blocks: Tensor) -> Codes:
    """Sixteen groups of 16 with scales of 6 bits; a number's third bit takes away 4 where it is off."""
    high, packed, scales = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    low_bits = _shifted(scales[:, None, :8], _NIBBLES, 15).flatten(1)
    high_bits = _shifted(scales[:, None, 8:], _PAIRS, 3).flatten(1)
    low = _shifted(packed.reshape(-1, 2, 1, 32), _PAIRS, 3).flatten(1)
    third = _shifted(high[:, None, :], _BITS, 1).flatten(1)
    return Codes(
        _centred(low | third << 2, 4),
        _centred(low_bits | high_bits << 4, 32).float(),
        block_scales=halves(blocks, 108),
    )


def _q4_k(blocks: Tensor) -> Codes:
    """Eight groups of 32: a scale and a minimum of 6 bits each."""
    numbers = _shifted(blocks[:, 16:].reshape(-1, 4, 1, 32), _NIBBLES, 15).flatten(1)
    return Codes(_centred(numbers, 8), *_scales_and_minimums(blocks))


def _q5_k(blocks: Tensor) -> Codes:
    high = _shifted(blocks[:, None, 16:48], _BITS, 1).flatten(1)
    low = _shifted(blocks[:, 48:].reshape(-1, 4, 1, 32), _NIBBLES, 15).flatten(1)
    return Codes(_centred(low | high << 4, 16), *_scales_and_minimums(blocks))


def _q6_k(blocks: Tensor) -> Codes:
    """Sixteen groups of 16 with scales of 8 bits."""
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    low = _shifted(blocks[:, :128].reshape(-1, 2, 1, 64), _NIBBLES, 15).flatten(1)
    high = _shifted(blocks[:, 128:192].reshape(-1, 2, 1, 32), _PAIRS, 3).flatten(1)
    values = _centred(low | high << 4, 32)
    return Codes(values, scales.float(), block_scales=halves(blocks, 208))


def _iq4_nl(blocks: Tensor) -> Codes:
    return Codes(_centred(_low_then_high(blocks[:, 2:]), 8), halves(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Codes:
    """Eight groups of 32 with scales of 6 bits; numbers as in IQ4_NL."""
    low = _shifted(blocks[:, 4:8, None], _NIBBLES, 15).flatten(1)
    high = _shifted(blocks[:, 2:4, None], _PAIRS, 3).flatten(1)
    places = _shifted(blocks[:, 8:].reshape(-1, 8, 1, 16), _NIBBLES, 15).flatten(1)
    scales = _centred(low | high << 4, 32).float()
    return Codes(_centred(places, 8), scales, block_scales=halves(blocks, 0))


def _tq1_0(blocks: Tensor) -> Codes:
    """Five numbers of -1, 0, 1 a byte, four in the last bytes: the digits of a fraction to base 3."""
    digits = [
        (blocks[:, start:end].reshape(len(blocks), 1, -1) * _factors(count)).flatten(1)
        for start, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    ]
    numbers = torch.cat(digits, dim=1).to(torch.int16) * 3 >> 8
    return Codes((numbers - 1).to(torch.int8), halves(blocks, 52))


def _tq2_0(blocks: Tensor) -> Codes:
    numbers = _shifted(blocks[:, :64].reshape(-1, 2, 1, 32), _PAIRS, 3).flatten(1)
    return Codes(_centred(numbers, 2), halves(blocks, 64))


def _mxfp4(blocks: Tensor) -> Codes:
    """The scale is a power of two (E8M0)."""
    exponent = blocks[:, :1].to(torch.int32) - 128
    scale = torch.ldexp(torch.ones(exponent.shape), exponent)
    return Codes(_centred(_low_then_high(blocks[:, 1:]), 8), scale)


def _nvfp4(blocks: Tensor) -> Codes:
    """Four groups of 16; scales are 8-bit floats (E4M3) whose sign does not count; 127 stands for 0."""
    stored = blocks[:, :4].to(torch.int32)
    exponent, mantissa = stored >> 3 & 15, stored & 7
    whole = torch.where(exponent == 0, mantissa, mantissa + 8).float()
    scales = torch.ldexp(whole, exponent.clamp(min=1) - 11)
    scales = torch.where(stored == 127, torch.zeros_like(scales), scales)
    places = _shifted(blocks[:, 4:].reshape(-1, 4, 1, 8), _NIBBLES, 15).flatten(1)
    return Codes(_centred(places, 8), scales)


def _scales_and_minimums(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scales and minimums [n, 8], and their blocks' [n, 1], of Q4_K and Q5_K: two float16, then twelve bytes
    that hold 16 times 6 bits."""
    first, second, rest = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat([first & 63, (rest & 15) | ((first >> 2) & 48)], dim=1)
    minimums = torch.cat([second & 63, (rest >> 4) | ((second >> 2) & 48)], dim=1)
    return scales.float(), minimums.float(), halves(blocks, 0), halves(blocks, 2)


def _centred(numbers: Tensor, middle: int) -> Tensor:
    """int8, ``middle`` less than the unsigned numbers."""
    return numbers.to(torch.int8) - middle


def _low_then_high(packed: Tensor) -> Tensor:
    """Two numbers of 4 bits a byte: first all low ones of the block, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=1)


def _fifth_bits(high: Tensor) -> Tensor:
    """32 bits of each block as 0 or 16: uint8 [n, 32]."""
    return _shifted(high[:, :, None], _BITS, 1).reshape(-1, 32) << 4


def _factors(count: int) -> Tensor:
    return torch.tensor(_THIRDS[:count], dtype=torch.uint8)[:, None]


def _shifted(packed: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """``packed`` once for each shift, along its dimension of size 1."""
    axis = packed.shape.index(1, 1)
    sizes = [1] * packed.dim()
    sizes[axis] = len(shifts)
    return packed >> torch.tensor(shifts, dtype=torch.uint8).view(sizes) & mask


KINDS: Mapping[str, CodeKind] = {
    "Q4_0": CodeKind(32, 18, 4, 32, _q4_0),
    "Q4_1": CodeKind(32, 20, 4, 32, _q4_1, zero_point=-8),
    "Q5_0": CodeKind(32, 22, 5, 32, _q5_0),
    "Q5_1": CodeKind(32, 24, 5, 32, _q5_1, zero_point=-16),
    "Q8_0": CodeKind(32, 34, 8, 32, _q8_0),
    "Q2_K": CodeKind(256, 84, 2, 16, _q2_k, zero_point=-2),
    "Q3_K": CodeKind(256, 110, 3, 16, _q3_k),
    "Q4_K": CodeKind(256, 144, 4, 32, _q4_k, zero_point=-8),
    "Q5_K": CodeKind(256, 176, 5, 32, _q5_k, zero_point=-16),
    "Q6_K": CodeKind(256, 210, 6, 16, _q6_k),
    "IQ4_NL": CodeKind(32, 18, 4, 32, _iq4_nl, table=_IQ4),
    "IQ4_XS": CodeKind(256, 136, 4, 32, _iq4_xs, table=_IQ4),
    "TQ1_0": CodeKind(256, 54, 2, 256, _tq1_0, kept_bytes=66),
    "TQ2_0": CodeKind(256, 66, 2, 256, _tq2_0, zero_point=-1),
    "MXFP4": CodeKind(32, 17, 4, 32, _mxfp4, table=_E2M1),
    "NVFP4": CodeKind(64, 36, 4, 16, _nvfp4, table=_E2M1),
    **VECTOR_KINDS,
}
"""The types that are read, by ggml's names."""
