"""Layers in small floats, drawn at random, and what they mean by arithmetic on their bits: for tests."""

from __future__ import annotations

import torch
from torch import Tensor

WIDTHS = {"e2m1": (4, 2), "e2m3": (6, 2), "e3m2": (6, 3), "e4m3": (8, 4)}
"""Bits, and bits of the exponent, of an element."""


def value(code: int, element: str) -> float:
    """The number that a code stands for, without infinities."""
    bits, exponent_bits = WIDTHS[element]
    mantissa_bits = bits - 1 - exponent_bits
    sign = -1.0 if code >> (bits - 1) else 1.0
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = (code & (2**mantissa_bits - 1)) / 2**mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    size = mantissa * 2.0 if exponent == 0 else (1 + mantissa) * 2.0**exponent
    return sign * size * 2.0**-bias


def drawn(weight: Tensor, element: str) -> tuple[Tensor, Tensor]:
    """Codes of the shape of weight [N, K], packed: uint8 [N, K * bits / 8] (float8_e4m3fn of E4M3), and their
    numbers [N, K]. Other weights have other codes; the second row is zeros."""
    bits, _ = WIDTHS[element]
    generator = torch.Generator().manual_seed(int(weight[2].abs().sum() * 100))
    codes = torch.randint(0, 2**bits, weight.shape, generator=generator)
    if bits == 8:
        codes[codes % 128 == 127] = 0
    codes[1] = 0
    packed = []
    for row in codes.tolist():
        run = sum(code << (bits * place) for place, code in enumerate(row))
        packed.append(list(run.to_bytes(len(row) * bits // 8, "little")))
    numbers = torch.tensor([[value(code, element) for code in row] for row in codes.tolist()])
    octets = torch.tensor(packed, dtype=torch.uint8)
    return octets.view(torch.float8_e4m3fn) if bits == 8 else octets, numbers


def exponents(rows: int, groups: int) -> tuple[Tensor, Tensor]:
    """Scales in E8M0, uint8 [rows, groups], and the powers of two that they are; the first row is larger."""
    stored = torch.randint(122, 125, (rows, groups), generator=torch.Generator().manual_seed(9))
    stored[0] += 6
    return stored.byte(), torch.exp2(stored - 127.0)
