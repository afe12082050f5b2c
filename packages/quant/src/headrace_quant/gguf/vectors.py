"""IQ1, IQ2 and IQ3: types of blocks that choose four or eight numbers at a time, from a code book of vectors.

All vectors of a type are made of a few different numbers. So its blocks become what other blocks are: a code
for each number, which chooses from a table, and scales (docs/adr/0092).

Layouts: ggml's ``ggml-common.h`` and ``dequantize_row_iq*`` of ``ggml-quants.c``. In tables of signed numbers
all bits of a number's place differ from those of its negative's, so that ``xor`` puts signs on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headrace_quant.gguf.code_books import code_numbers, code_places
from headrace_quant.gguf.codes import CodeKind, Codes, halves

_OCTETS = 0x0101010101010101
"""Times a number below 256: that number in eight bytes."""


def _signed(magnitudes: tuple[float, ...]) -> tuple[float, ...]:
    """Table of numbers in ascending order, 8 or 16 of them; zeros at both ends fill it up."""
    rest = (0.0,) * ((4 if len(magnitudes) <= 4 else 8) - len(magnitudes))
    return (*rest, *(-each for each in reversed(magnitudes)), *magnitudes, *rest)


def _table(name: str, divisor: int) -> tuple[float, ...]:
    """Table of a code book's numbers, divided by what makes the scales of groups whole."""
    return _signed(tuple(number / divisor for number in code_numbers(name)))


# --- IQ1: -1, 0 or 1, and an eighth more or less ----------------------------------------------


def _iq1_s(blocks: Tensor) -> Codes:
    """Eight groups of 32: a scale of 3 bits, and one sign of the eighth, which goes into the minimum.

    ``(g + 1/8) * s = (g + 1) * s - 7 * s / 8``, and with ``g - 1/8`` it is 9.
    """
    fields = _words(blocks[:, 34:50], torch.int16)
    scales = 2 * (fields >> 12 & 7) + 1
    lower = torch.where(fields >> 15 == 1, 9, 7)
    high = (fields[:, :, None] >> torch.tensor([0, 3, 6, 9]) & 7).flatten(1)
    places = _vectors("IQ1_S")[blocks[:, 2:34].long() | high << 8]
    outer = halves(blocks, 0)
    return Codes(_octets(places) - 2, scales.float(), (lower * scales).float(), outer, outer / 8)


def _iq1_m(blocks: Tensor) -> Codes:
    """Sixteen groups of 16 with scales of 3 bits; each vector of 8 has its own sign of the eighth.

    The block's float16 scale lies in the highest 4 bits of the four words of scales.
    """
    fields = _nibbles(blocks[:, 32:48])
    words = _words(blocks[:, 48:56], torch.int16)
    bits = (words >> 12 << torch.tensor([0, 4, 8, 12])).sum(1, keepdim=True)
    outer = bits.to(torch.uint16).view(torch.float16).float()
    scales = 2 * (words[:, :, None] >> torch.tensor([0, 3, 6, 9]) & 7).flatten(1) + 1
    # The table is 0, -9, -7, -1, 1, 7, 9, 0 eighths: -1, 0 and 1 take every other place, from 1 or 2 on.
    first = torch.where(fields >> 3 == 1, 1, 2)
    places = _vectors("IQ1_S")[blocks[:, :32].long() | (fields & 7) << 8]
    return _codes(2 * places + first * _OCTETS, 3, scales, outer)


# --- IQ2 and IQ3: magnitudes and signs --------------------------------------------------------


def _iq2_xxs(blocks: Tensor) -> Codes:
    """Eight groups of 32 with scales of 4 bits."""
    chosen = blocks[:, 2:66].reshape(-1, 8, 8)[:, :, :4].flatten(1)
    fields = _words(blocks[:, 2:66], torch.int32)[:, 1::2]
    places = _magnitudes("IQ2_XXS", 3)[chosen.long()] ^ _seven_signs(fields, 3)
    return _codes(places, 3, 2 * (fields >> 28) + 1, halves(blocks, 0))


def _iq2_xs(blocks: Tensor) -> Codes:
    """Sixteen groups of 16 with scales of 4 bits."""
    fields = _words(blocks[:, 2:66], torch.int16)
    places = _magnitudes("IQ2_XS", 3)[fields & 511] ^ _flips(3, parity=True)[fields >> 9]
    return _codes(places, 3, 2 * _nibbles(blocks[:, 66:74]) + 1, halves(blocks, 0))


def _iq2_s(blocks: Tensor) -> Codes:
    """Sixteen groups of 16 with scales of 4 bits."""
    high = (blocks[:, 66:74, None].long() >> torch.tensor([0, 2, 4, 6]) & 3).flatten(1)
    places = _magnitudes("IQ2_S", 3)[blocks[:, 2:34].long() | high << 8]
    places = places ^ _flips(3)[blocks[:, 34:66].long()]
    return _codes(places, 3, 2 * _nibbles(blocks[:, 74:82]) + 1, halves(blocks, 0))


def _iq3_xxs(blocks: Tensor) -> Codes:
    """Eight groups of 32 with scales of 4 bits; vectors of four."""
    fields = _words(blocks[:, 66:98], torch.int32)
    places = _pairs(_magnitudes("IQ3_XXS", 4), blocks[:, 2:66].long()) ^ _seven_signs(fields, 4)
    return _codes(places, 4, 2 * (fields >> 28) + 1, halves(blocks, 0))


def _iq3_s(blocks: Tensor) -> Codes:
    """Eight groups of 32 with scales of 4 bits; vectors of four."""
    high = (blocks[:, 66:74, None].long() >> torch.arange(8) & 1).flatten(1)
    places = _pairs(_magnitudes("IQ3_S", 4), blocks[:, 2:66].long() | high << 8)
    places = places ^ _flips(4)[blocks[:, 74:106].long()]
    return _codes(places, 4, 2 * _nibbles(blocks[:, 106:110]) + 1, halves(blocks, 0))


def _codes(places: Tensor, bits: int, scales: Tensor, outer: Tensor) -> Codes:
    """places int64 [n, vectors] of eight bytes, scales int64 [n, groups]."""
    return Codes(_octets(places) - (1 << bits - 1), scales.float(), block_scales=outer)


# --- vectors as words of eight bytes ----------------------------------------------------------


@functools.cache
def _vectors(name: str) -> Tensor:
    """Vectors of a code book, a byte a number: int64 [vectors] of eight, int32 of four."""
    places = code_places(name)
    return places.view(torch.int64 if places.shape[1] == 8 else torch.int32)[:, 0]


@functools.cache
def _magnitudes(name: str, bits: int) -> Tensor:
    """The same as places of positive numbers in a table of :func:`_signed`."""
    vectors = _vectors(name)
    return vectors + (1 << bits - 1) * (_OCTETS & (1 << 8 * vectors.itemsize) - 1)


@functools.cache
def _flips(bits: int, *, parity: bool = False) -> Tensor:
    """Words that change the signs of eight places, by the bits that say which: int64 [256].

    Args:
        bits: of a place.
        parity: 7 bits say it, [128]; the eighth makes the number of changed signs even.
    """
    changed = torch.arange(128 if parity else 256)[:, None] >> torch.arange(8) & 1
    if parity:
        changed[:, 7] = changed.sum(1) & 1
    return (changed * ((1 << bits) - 1)).byte().view(torch.int64)[:, 0]


def _seven_signs(fields: Tensor, bits: int) -> Tensor:
    """fields int64 [n, groups], which say the signs of four vectors of eight each, in 7 bits a vector ->
    int64 [n, 4 * groups]."""
    return _flips(bits, parity=True)[
        (fields[:, :, None] >> torch.tensor([0, 7, 14, 21]) & 127).flatten(1)
    ]


def _pairs(vectors: Tensor, chosen: Tensor) -> Tensor:
    """Two vectors of four side by side: vectors int32 [vectors], chosen int64 [n, m] -> int64 [n, m / 2]."""
    return vectors[chosen].view(torch.int64)


def _octets(words: Tensor) -> Tensor:
    """int64 [n, words] -> their bytes, int8 [n, 8 * words]."""
    return words.view(torch.int8)


def _words(packed: Tensor, kind: torch.dtype) -> Tensor:
    """Unsigned little-endian words of ``kind``'s size: int64 [n, words]."""
    own = packed.clone(memory_format=torch.contiguous_format)  # at an address that words may have
    return own.view(kind).long() & ((1 << 8 * kind.itemsize) - 1)


def _nibbles(packed: Tensor) -> Tensor:
    """Each byte's low half, then its high one: int64 [n, 2 * bytes]."""
    return (packed[:, :, None].long() >> torch.tensor([0, 4]) & 15).flatten(1)


def _kind(
    num_bytes: int, group_size: int, codes: Callable[[Tensor], Codes], table: tuple[float, ...]
) -> CodeKind:
    """256 codes of a table, a byte for each group's scale and two for the block's."""
    bits = 3 if len(table) == 8 else 4
    kept = 256 * bits // 8 + 256 // group_size + 2
    return CodeKind(256, num_bytes, bits, group_size, codes, table=table, kept_bytes=kept)


VECTOR_KINDS: Mapping[str, CodeKind] = {
    # 2 bits a weight, a byte for each group's scale and one for its minimum, four for the block's
    "IQ1_S": CodeKind(256, 50, 2, 32, _iq1_s, zero_point=-2, kept_bytes=84),
    "IQ1_M": _kind(56, 16, _iq1_m, _signed((1 / 8, 7 / 8, 9 / 8))),
    "IQ2_XXS": _kind(66, 32, _iq2_xxs, _table("IQ2_XXS", 8)),
    "IQ2_XS": _kind(74, 16, _iq2_xs, _table("IQ2_XS", 8)),
    "IQ2_S": _kind(82, 16, _iq2_s, _table("IQ2_S", 8)),
    "IQ3_XXS": _kind(98, 32, _iq3_xxs, _table("IQ3_XXS", 4)),
    "IQ3_S": _kind(110, 32, _iq3_s, _table("IQ3_S", 1)),
}
