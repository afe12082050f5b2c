"""``q4_0``, ``q8_0``, ``q4_k``, ``q5_k``, ``q6_k``: blocks of GGUF files, in safetensors files.

``weight`` uint8 [N, bytes of a row]. The layouts are ggml's: github.com/ggml-org/ggml, ``ggml-common.h``.
Only headrace reads such a checkpoint: for llama.cpp, use its own converter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace_core.linear import WeightEncoder
from headrace_quant.encoders.least_squares import asymmetric, finite, rows_at_once, symmetric

SUPER = 256
"""Numbers of a block of the k-quants."""


class BlockEncoder(WeightEncoder):
    """Base: rows are whole blocks."""

    kind: ClassVar[str]
    """Name of the blocks' type."""
    elements: ClassVar[int] = SUPER

    def encode(self, weight: Tensor) -> Mapping[str, Tensor] | None:
        rows, inputs = weight.shape
        if inputs % self.elements:
            return None
        step = rows_at_once(inputs)
        pieces = [
            self.blocks(finite(weight[start : start + step]).view(-1, self.elements)).view(
                min(step, rows - start), -1
            )
            for start in range(0, rows, step)
        ]
        return {"weight": torch.cat(pieces)}

    def blocks(self, numbers: Tensor) -> Tensor:
        """numbers [B, elements] float32 -> [B, bytes of a block] uint8."""
        raise NotImplementedError

    def config(self, encoded: Sequence[str], left: Sequence[str]) -> Mapping[str, Any]:
        return {"quant_method": "gguf", "types": dict.fromkeys(encoded, self.kind)}


class Q80Encoder(BlockEncoder):
    """8 bits, a scale for every 32 inputs: 8.5 bits a weight."""

    kind, elements = "Q8_0", 32

    def blocks(self, numbers: Tensor) -> Tensor:
        scale = (numbers.abs().amax(1, keepdim=True) / 127).half()
        codes = _codes(numbers, scale.float(), -127, 127).to(torch.int8)
        return torch.cat([_octets(scale), codes.view(torch.uint8)], 1)


class Q40Encoder(BlockEncoder):
    """4 bits, a scale for every 32 inputs: 4.5 bits a weight."""

    kind, elements = "Q4_0", 32

    def blocks(self, numbers: Tensor) -> Tensor:
        scale = symmetric(numbers, -8, 7, signed_scale=True).scale[:, None].half()
        codes = (_codes(numbers, scale.float(), -8, 7) + 8).byte()
        return torch.cat([_octets(scale), codes[:, :16] | codes[:, 16:] << 4], 1)


class Q4KEncoder(BlockEncoder):
    """4 bits, a scale and a minimum of 6 bits for every 32 inputs: 4.5 bits a weight."""

    kind = "Q4_K"
    bits: ClassVar[int] = 4

    def blocks(self, numbers: Tensor) -> Tensor:
        groups = numbers.view(-1, 8, 32)
        found = asymmetric(groups, (1 << self.bits) - 1)
        outer, scales = _six_bits(found.scale)
        outer_minimum, minimums = _six_bits(found.minimum)
        scale = (outer.float() * scales)[..., None]
        least = (outer_minimum.float() * minimums)[..., None]
        codes = ((groups + least) / torch.where(scale == 0, 1.0, scale)).round()
        codes = codes.clamp(0, (1 << self.bits) - 1).byte()
        header = [
            _octets(outer),
            _octets(outer_minimum),
            _twelve_octets(scales.byte(), minimums.byte()),
        ]
        return torch.cat([*header, *self.planes(codes)], 1)

    def planes(self, codes: Tensor) -> list[Tensor]:
        """codes [B, 8, 32] uint8 -> the bytes behind a block's scales."""
        return [_nibbles(codes)]


class Q5KEncoder(Q4KEncoder):
    """5 bits, a scale and a minimum of 6 bits for every 32 inputs: 5.5 bits a weight."""

    kind, bits = "Q5_K", 5

    def planes(self, codes: Tensor) -> list[Tensor]:
        fifth = (codes >> 4) << torch.arange(8, dtype=torch.uint8)[:, None]
        return [fifth.sum(1).byte(), _nibbles(codes & 15)]


class Q6KEncoder(BlockEncoder):
    """6 bits, a scale of 8 bits for every 16 inputs: 6.56 bits a weight."""

    kind = "Q6_K"

    def blocks(self, numbers: Tensor) -> Tensor:
        groups = numbers.view(-1, 16, 16)
        wanted = symmetric(groups, -32, 31, signed_scale=True, shrinks=(1.0,)).scale
        largest = wanted.gather(1, wanted.abs().argmax(1, keepdim=True))
        outer = (largest / -128).half()
        scales = _codes(wanted, outer.float(), -128, 127)
        codes = _codes(groups, (outer.float() * scales)[..., None], -32, 31) + 32
        quarters = codes.byte().view(-1, 2, 4, 32)
        low, high = quarters & 15, quarters >> 4
        nibbles = low[:, :, :2] | low[:, :, 2:] << 4
        pairs = (high << torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]).sum(2).byte()
        signed = scales.to(torch.int8).view(torch.uint8)
        return torch.cat([nibbles.flatten(1), pairs.flatten(1), signed, _octets(outer)], 1)


def _codes(numbers: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    return (numbers / torch.where(scale == 0, 1.0, scale)).round().clamp(low, high)


def _octets(halves: Tensor) -> Tensor:
    """[B, 1] float16 -> [B, 2] uint8."""
    return halves.contiguous().view(torch.uint8)


def _six_bits(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """wanted [B, 8], not negative -> a float16 step [B, 1] and whole numbers within [0, 63]."""
    step = (wanted.amax(1, keepdim=True) / 63).half()
    return step, _codes(wanted, step.float(), 0, 63)


def _twelve_octets(scales: Tensor, minimums: Tensor) -> Tensor:
    """Eight scales and eight minimums of 6 bits: [B, 8] uint8 each -> [B, 12]."""
    low = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    middle = minimums[:, :4] | (minimums[:, 4:] >> 4) << 6
    return torch.cat([low, middle, (scales[:, 4:] & 15) | (minimums[:, 4:] & 15) << 4], 1)


def _nibbles(codes: Tensor) -> Tensor:
    """codes [B, 8, 32] below 16 -> [B, 128]: of two neighbouring groups the first is low."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).flatten(1)
