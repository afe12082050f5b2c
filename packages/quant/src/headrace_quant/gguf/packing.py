"""Weights [N, K] in blocks -> packed weights, or floats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields

import torch
from torch import Tensor

from headrace_core.ops import QuantizedWeight
from headrace_quant.gguf.blocks import KINDS, dequantize
from headrace_quant.gguf.codes import CodeKind, Codes

_NUMBERS_AT_ONCE = 1 << 20
"""Blocks are taken apart in slices, so that intermediate results never exist of a whole weight."""


def packed_weight(name: str, raw: Tensor) -> QuantizedWeight:
    """The weight that rows of blocks are. Nothing of ``raw`` is kept.

    Args:
        name: one of :data:`~headrace_quant.gguf.blocks.KINDS`.
        raw: uint8 [N, bytes of a row].

    Raises:
        ValueError: a scale or a minimum is infinite or no number.
    """
    kind = KINDS[name]
    blocks = raw.shape[1] // kind.num_bytes
    return weight_of_codes(name, raw.shape[0], blocks, _slices(kind, raw))


def weight_of_codes(
    name: str, rows: int, blocks: int, pieces: Iterable[tuple[int, Codes]]
) -> QuantizedWeight:
    """A weight of ``rows`` rows, each of so many blocks of a type.

    Args:
        pieces: codes of some rows at a time, and the first of these rows.

    Raises:
        ValueError: a scale or a minimum is infinite or no number.
    """
    kind = KINDS[name]
    found: dict[str, Tensor] = {}
    for start, codes in pieces:
        for field in fields(codes):
            part: Tensor | None = getattr(codes, field.name)
            if part is None:
                continue
            if field.name not in found:
                shape = (rows, blocks * part.shape[1])
                found[field.name] = torch.empty(shape, dtype=part.dtype)
            own = part.view(-1, blocks * part.shape[1])
            found[field.name][start : start + len(own)] = own
    largest = 1.0 if kind.table is None else max(map(abs, kind.table))
    for key, tensor in found.items():
        if key != "values" and not bool((tensor * largest).isfinite().all()):
            raise ValueError(f"{key} of its {name} blocks are not finite")
    groups = (rows, blocks * kind.elements // kind.group_size)
    zero, table = kind.zero_point, kind.table
    return QuantizedWeight(
        **found,
        zero_points=None if zero is None else torch.full(groups, zero, dtype=torch.int8),
        bits=kind.bits,
        group_size=kind.group_size,
        table=None if table is None else torch.tensor(table, dtype=torch.float32),
        block_size=kind.elements if "block_scales" in found else None,
    )


def floats(name: str, raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of blocks: raw uint8 [..., bytes of a row] -> [..., numbers of a row]."""
    kind = KINDS[name]
    blocks = raw.reshape(-1, kind.num_bytes)
    out = torch.empty(len(blocks), kind.elements, dtype=dtype)
    step = max(1, _NUMBERS_AT_ONCE // kind.elements)
    for start in range(0, len(blocks), step):
        out[start : start + step] = dequantize(name, blocks[start : start + step])
    return out.view(*raw.shape[:-1], -1)


def _slices(kind: CodeKind, raw: Tensor) -> Iterator[tuple[int, Codes]]:
    """Codes of some rows at a time, and the first of these rows; an empty weight has one slice."""
    inputs = raw.shape[1] // kind.num_bytes * kind.elements
    step = max(1, _NUMBERS_AT_ONCE // max(1, inputs))
    for start in range(0, max(1, raw.shape[0]), step):
        yield start, kind.codes(raw[start : start + step].reshape(-1, kind.num_bytes))
