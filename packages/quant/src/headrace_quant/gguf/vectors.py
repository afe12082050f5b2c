"""Blocks of a GGUF file whose numbers are chosen four or eight at a time from a code book of vectors.

Layouts: ggml's ``ggml-common.h`` and ``dequantize_row_iq*`` of ``ggml-quants.c``. Every function gives
float32 [n, 256] of blocks uint8 [n, bytes of a block], in ggml's order of products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_quant.gguf.code_books import code_book

_DELTA = 0.125


def iq1_s(blocks: Tensor) -> Tensor:
    low, fields = blocks[:, 2:34], _words(blocks[:, 34:50], torch.int16)
    scale = _half(blocks) * (2 * (fields >> 12 & 7) + 1)
    shift = _signs(fields >> 15) * _DELTA
    high = (fields[:, :, None] >> torch.tensor([0, 3, 6, 9]) & 7).flatten(1)
    grid = code_book("IQ1_S")[low.long() | high << 8].view(-1, 8, 32)
    return (scale[:, :, None] * (grid + shift[:, :, None])).flatten(1)


def iq1_m(blocks: Tensor) -> Tensor:
    """The block's float16 scale lies in the highest 4 bits of the four words of scales."""
    low, fields = blocks[:, :32], _nibbles(blocks[:, 32:48])
    words = _words(blocks[:, 48:56], torch.int16)
    bits = (words >> 12 << torch.tensor([0, 4, 8, 12])).sum(1, keepdim=True)
    whole = bits.to(torch.uint16).view(torch.float16).float()
    scale = whole * (2 * (words[:, :, None] >> torch.tensor([0, 3, 6, 9]) & 7).flatten(1) + 1)
    shift = (_signs(fields >> 3) * _DELTA).view(-1, 16, 2, 1)
    grid = code_book("IQ1_S")[low.long() | (fields & 7) << 8].view(-1, 16, 2, 8)
    return (scale[:, :, None, None] * (grid + shift)).flatten(1)


def iq2_xxs(blocks: Tensor) -> Tensor:
    places = blocks[:, 2:66].reshape(-1, 8, 8)[:, :, :4]
    fields = _words(blocks[:, 2:66], torch.int32)[:, 1::2]
    scale = _half(blocks) * (0.5 + (fields >> 28)) * 0.25
    grid = code_book("IQ2_XXS")[places.long()]
    return (scale[:, :, None, None] * grid * _seven_signs(fields)).flatten(1)


def iq2_xs(blocks: Tensor) -> Tensor:
    fields = _words(blocks[:, 2:66], torch.int16)
    scale = _half(blocks) * (0.5 + _nibbles(blocks[:, 66:74])) * 0.25
    grid = code_book("IQ2_XS")[fields & 511].view(-1, 16, 16)
    signs = _signs(_bits(_with_parity(fields >> 9))).view(-1, 16, 16)
    return (scale[:, :, None] * grid * signs).flatten(1)


def iq2_s(blocks: Tensor) -> Tensor:
    high = (blocks[:, 66:74, None].long() >> torch.tensor([0, 2, 4, 6]) & 3).flatten(1)
    scale = _half(blocks) * (0.5 + _nibbles(blocks[:, 74:82])) * 0.25
    grid = code_book("IQ2_S")[blocks[:, 2:34].long() | high << 8].view(-1, 16, 16)
    signs = _signs(_bits(blocks[:, 34:66].long())).view(-1, 16, 16)
    return (scale[:, :, None] * grid * signs).flatten(1)


def iq3_xxs(blocks: Tensor) -> Tensor:
    fields = _words(blocks[:, 66:98], torch.int32)
    scale = _half(blocks) * (0.5 + (fields >> 28)) * 0.5
    grid = code_book("IQ3_XXS")[blocks[:, 2:66].long()].view(-1, 8, 4, 8)
    return (scale[:, :, None, None] * grid * _seven_signs(fields)).flatten(1)


def iq3_s(blocks: Tensor) -> Tensor:
    high = _bits(blocks[:, 66:74].long()).flatten(1)
    scale = _half(blocks) * (1 + 2 * _nibbles(blocks[:, 106:110]))
    grid = code_book("IQ3_S")[blocks[:, 2:66].long() | high << 8].view(-1, 8, 32)
    signs = _signs(_bits(blocks[:, 74:106].long())).view(-1, 8, 32)
    return (scale[:, :, None] * grid * signs).flatten(1)


def _half(blocks: Tensor) -> Tensor:
    """The float16 that a block begins with: float32 [n, 1]."""
    return blocks[:, :2].contiguous().view(torch.float16).float()


def _words(packed: Tensor, kind: torch.dtype) -> Tensor:
    """Unsigned little-endian words of ``kind``'s size: int64 [n, words]."""
    return packed.contiguous().view(kind).long() & ((1 << 8 * kind.itemsize) - 1)


def _nibbles(packed: Tensor) -> Tensor:
    """Each byte's low half, then its high one: int64 [n, 2 * bytes]."""
    return (packed[:, :, None].long() >> torch.tensor([0, 4]) & 15).flatten(1)


def _bits(packed: Tensor) -> Tensor:
    """int64 [..., 8], lowest first."""
    return packed[..., None] >> torch.arange(8) & 1


def _signs(bits: Tensor) -> Tensor:
    """0 -> 1.0, 1 -> -1.0."""
    return (1 - 2 * bits).float()


def _seven_signs(fields: Tensor) -> Tensor:
    """The signs of four vectors of eight, 7 bits each: float32 [n, fields, 4, 8]."""
    return _signs(_bits(_with_parity(fields[:, :, None] >> torch.tensor([0, 7, 14, 21]) & 127)))


def _with_parity(seven: Tensor) -> Tensor:
    """7 bits and an eighth that makes the number of set ones even."""
    return seven | (_bits(seven).sum(-1) & 1) << 7
