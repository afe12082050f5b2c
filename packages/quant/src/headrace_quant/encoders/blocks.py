"""``q4_0``, ``q8_0``, ``q4_k``, ``q5_k``, ``q6_k``: blocks of GGUF files, in safetensors files.

``weight`` uint8 [N, bytes of a row]. The layouts are ggml's: github.com/ggml-org/ggml, ``ggml-common.h``.
Only headrace reads such a checkpoint: for llama.cpp, use its own converter.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace_core.linear import WeightEncoder
from headrace_core.ops import KernelNeed, OpTable, bind_ops
from headrace_core.ops.optional.round_k_quant import ROUND_K_QUANT
from headrace_quant.encoders.least_squares import columns, inverse, rows_at_once, symmetric
from headrace_quant.gguf.codes import Codes

SUPER = 256
"""Numbers of a block of the k-quants."""


class BlockEncoder(WeightEncoder):
    """Base: rows are whole blocks.

    Args:
        ops: that round k-quants; None: those of the CPU.
    """

    kind: ClassVar[str]
    """Name of the blocks' type."""
    elements: ClassVar[int] = SUPER

    def __init__(self, ops: OpTable | None = None) -> None:
        self.ops = ops

    def encode(self, weight: Tensor) -> Mapping[str, Tensor] | None:
        if weight.shape[1] % self.elements:
            return None
        count = weight.shape[1] // self.elements
        pieces = [
            self.blocks(codes).view(len(codes.values) // count, -1)
            for _, codes in self.pieces(weight)
        ]
        return {"weight": torch.cat(pieces)}

    def pieces(self, weight: Tensor) -> Iterator[tuple[int, Codes]]:
        """Codes of some rows at a time, and the first of these rows: weight [N, K] of any floating dtype.

        Raises:
            WeightsError: it holds infinities or NaN.
        """
        step = rows_at_once(weight.shape[1])
        for start in range(0, max(1, weight.shape[0]), step):
            yield start, self.codes(weight[start : start + step])

    @abstractmethod
    def codes(self, weight: Tensor) -> Codes:
        """Codes of rows [R, K], block by block.

        Raises:
            WeightsError: they hold infinities or NaN.
        """

    @abstractmethod
    def blocks(self, codes: Codes) -> Tensor:
        """Codes of B blocks as they lie in a file: uint8 [B, bytes of a block]."""

    def config(self, encoded: Sequence[str], left: Sequence[str]) -> Mapping[str, Any]:
        return {"quant_method": "gguf", "types": dict.fromkeys(encoded, self.kind)}


class Q80Encoder(BlockEncoder):
    """8 bits, a scale for every 32 inputs: 8.5 bits a weight."""

    kind, elements = "Q8_0", 32

    def codes(self, weight: Tensor) -> Codes:
        groups = columns(weight, 32)
        scale = _halved(torch.maximum(groups.amax(0), -groups.amin(0)) / 127)
        values = _values(groups, inverse(scale), -127, 127)
        return Codes(values, scale[:, None])

    def blocks(self, codes: Codes) -> Tensor:
        return torch.cat([_octets(codes.scales), codes.values.view(torch.uint8)], 1)


class Q40Encoder(BlockEncoder):
    """4 bits, a scale for every 32 inputs: 4.5 bits a weight."""

    kind, elements = "Q4_0", 32

    def codes(self, weight: Tensor) -> Codes:
        groups = columns(weight, 32)
        scale = _halved(symmetric(groups, -8, 7, signed_scale=True))
        return Codes(_values(groups, inverse(scale), -8, 7), scale[:, None])

    def blocks(self, codes: Codes) -> Tensor:
        places = _places(codes, 4)
        return torch.cat([_octets(codes.scales), places[:, :16] | places[:, 16:] << 4], 1)


class KQuantEncoder(BlockEncoder):
    """Base of the types that an op rounds to."""

    bits: ClassVar[int]

    def codes(self, weight: Tensor) -> Codes:
        if self.ops is None:
            self.ops = bind_ops(KernelNeed(device="cpu", dtype="float32"))
        found = self.ops.optional(ROUND_K_QUANT)(weight, self.bits)
        scales, minimums, outer, outer_minimums = (
            None if part is None else part.view(-1, part.shape[1] * SUPER // weight.shape[1])
            for part in (
                found.scales,
                found.minimums,
                found.block_scales,
                found.block_minimums,
            )
        )
        assert scales is not None
        return Codes(found.values.view(-1, SUPER), scales, minimums, outer, outer_minimums)


class Q4KEncoder(KQuantEncoder):
    """4 bits, a scale and a minimum of 6 bits for every 32 inputs: 4.5 bits a weight."""

    kind, bits = "Q4_K", 4

    def blocks(self, codes: Codes) -> Tensor:
        assert codes.block_scales is not None
        assert codes.minimums is not None
        assert codes.block_minimums is not None
        header = [
            _octets(codes.block_scales),
            _octets(codes.block_minimums),
            _twelve_octets(codes.scales.byte(), codes.minimums.byte()),
        ]
        return torch.cat([*header, *self.planes(_places(codes, self.bits).view(-1, 8, 32))], 1)

    def planes(self, places: Tensor) -> list[Tensor]:
        """places [B, 8, 32] uint8 -> the bytes behind a block's scales."""
        return [_nibbles(places)]


class Q5KEncoder(Q4KEncoder):
    """5 bits, a scale and a minimum of 6 bits for every 32 inputs: 5.5 bits a weight."""

    kind, bits = "Q5_K", 5

    def planes(self, places: Tensor) -> list[Tensor]:
        fifth = (places >> 4) << torch.arange(8, dtype=torch.uint8)[:, None]
        return [fifth.sum(1).byte(), _nibbles(places & 15)]


class Q6KEncoder(KQuantEncoder):
    """6 bits, a scale of 8 bits for every 16 inputs: 6.56 bits a weight."""

    kind, bits = "Q6_K", 6

    def blocks(self, codes: Codes) -> Tensor:
        assert codes.block_scales is not None
        quarters = _places(codes, 6).view(-1, 2, 4, 32)
        low, high = quarters & 15, quarters >> 4
        nibbles = low[:, :, :2] | low[:, :, 2:] << 4
        pairs = (high << torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]).sum(2).byte()
        signed, outer = codes.scales.to(torch.int8).view(torch.uint8), _octets(codes.block_scales)
        return torch.cat([nibbles.flatten(1), pairs.flatten(1), signed, outer], 1)


def _halved(x: Tensor) -> Tensor:
    """x rounded to float16, in float32."""
    return x.half().float()


def _values(groups: Tensor, finer: Tensor, low: int, high: int) -> Tensor:
    """``groups * finer`` to the nearest whole numbers within [low, high], group by group.

    Args:
        groups: float32 [G, groups]; overwritten.
        finer: [groups].

    Returns:
        int8 [groups, G].
    """
    groups *= finer
    found = torch.empty(groups.shape[1], groups.shape[0], dtype=torch.int8)
    return found.copy_(groups.round_().clamp_(low, high).T)


def _places(codes: Codes, bits: int) -> Tensor:
    """Codes from 0 on, as files have them: uint8 [B, numbers of a block]."""
    return (codes.values + (1 << bits - 1)).view(torch.uint8)


def _octets(halves: Tensor) -> Tensor:
    """[B, 1] of float16's numbers -> [B, 2] uint8."""
    return halves.half().view(torch.uint8)


def _twelve_octets(scales: Tensor, minimums: Tensor) -> Tensor:
    """Eight scales and eight minimums of 6 bits: [B, 8] uint8 each -> [B, 12]."""
    low = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    middle = minimums[:, :4] | (minimums[:, 4:] >> 4) << 6
    return torch.cat([low, middle, (scales[:, 4:] & 15) | (minimums[:, 4:] & 15) << 4], 1)


def _nibbles(places: Tensor) -> Tensor:
    """places [B, 8, 32] below 16 -> [B, 128]: of two neighbouring groups the first is low."""
    return (places[:, ::2] | places[:, 1::2] << 4).flatten(1)
