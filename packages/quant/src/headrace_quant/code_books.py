"""Code books of few-bit floats, and codes as they lie in bytes.

Tables are by code: the entry at a place is the number that the code stands for.

Sources: E2M1, E4M3, E5M2 and E8M0 are of the OCP Microscaling Formats (MX) specification 1.0; NF4 is of
Dettmers et al. 2023, arXiv:2305.14314, appendix E; FP4 is that of github.com/bitsandbytes-foundation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headrace_core.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor


def _signed(magnitudes: Sequence[float]) -> tuple[float, ...]:
    """Codes of a sign, which is the topmost bit, and a magnitude."""
    return (*magnitudes, *(-value for value in magnitudes))


E2M1 = _signed([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M3 = _signed(
    [*(m / 8 for m in range(8)), *((8 + m) / 8 * 2.0**e for e in range(3) for m in range(8))]
)
E3M2 = _signed(
    [*(m / 16 for m in range(4)), *((4 + m) / 16 * 2.0**e for e in range(7) for m in range(4))]
)
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = tuple(sign * value / 12 for sign in (1.0, -1.0) for value in _FP4)
E8M0_BIAS, _E8M0_NAN = 127, 255
_MANTISSA = 23
"""Bits of float32's."""


def table(values: Sequence[float], like: Tensor) -> Tensor:
    """A code book float32, on the device of another tensor."""
    return torch.tensor(values, dtype=torch.float32, device=like.device)


def float8_table(dtype: torch.dtype, like: Tensor) -> Tensor:
    """[256] float32: the values of an 8-bit float's bytes; NaN where they are NaN."""
    return torch.arange(256, device=like.device).to(torch.uint8).view(dtype).float()


def nibble_codes(octets: Tensor, *, high_first: bool = False) -> Tensor:
    """octets [R, C] uint8 -> codes [R, 2 C] int8, less 8; a byte's lower half comes first, or its upper."""
    halves = (octets >> 4, octets & 15) if high_first else (octets & 15, octets >> 4)
    return torch.stack(halves, dim=-1).flatten(-2).view(torch.int8) - 8


def octet_codes(octets: Tensor) -> Tensor:
    """Bytes of any dtype -> codes int8, less 128."""
    return (octets.contiguous().view(torch.uint8) ^ 128).view(torch.int8)


def e8m0_scales(name: str, exponents: Tensor) -> Tensor:
    """Powers of two, float32, of exponents plus 127, uint8.

    Raises:
        WeightsError: one is 255, which is no number; names the layer.
    """
    if bool((exponents == _E8M0_NAN).any()):
        raise WeightsError(f"layer {name!r}: a scale (E8M0) is 255, which is not a number")
    return powers_of_two(exponents)


def powers_of_two(exponents: Tensor) -> Tensor:
    """exponents plus 127, integers in [0, 254] -> float32: they are float32's own, but for a subnormal."""
    bits = exponents.int() << _MANTISSA
    return torch.where(bits == 0, 1 << (_MANTISSA - 1), bits).view(torch.float32)
