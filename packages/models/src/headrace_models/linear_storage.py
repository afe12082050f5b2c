"""How a model's linear layers are stored, and what one decode step reads of them, from a model not loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from headrace_core.linear import LinearMethod, LinearSpec
from headrace_models.layer_parts import HEAD
from headrace_models.layers.base import Layer, walk
from headrace_models.layers.embedding import QuantizedTableHead
from headrace_models.layers.linear import Linear, QuantizedTiedLinear, TiedLinear
from headrace_models.layers.moe.experts import Experts
from headrace_models.layers.moe.router import Router


class LinearStorage(NamedTuple):
    """Linear layers that are stored alike."""

    bits: float
    """For each weight, with scales and whatever else belongs to it."""
    layers: int
    """Modules of the checkpoint."""
    names: tuple[str, ...]
    """The last parts of their names, each once."""
    num_bytes: int


class LinearRead(NamedTuple):
    """A linear layer, or an expert's half of one, as a decode step reads it."""

    spec: LinearSpec
    num_bytes: int
    share: float
    """Part of the layer that one token reads: of experts, those that it goes to."""
    is_head: bool = False
    """True if it makes logits."""

    @property
    def is_gated(self) -> bool:
        """True if gates and ups are fused, which one kernel multiplies together."""
        own, parts = self.spec.name.rpartition(".")[2], _last_names(self.spec)
        return "gate_up" in own or (len(parts) == 2 and "gate" in parts[0])


def linear_storage(model: Layer, dtype: str) -> tuple[LinearStorage, ...]:
    """The model's linear layers by the bits of their weights, the most bytes first.

    Args:
        model: built; loading makes no difference.
        dtype: of floating weights.
    """
    alike: dict[float, list[LinearRead]] = {}
    for each in linear_reads(model, dtype):
        bits = 8 * each.num_bytes / max(1, each.spec.in_features * each.spec.out_features)
        alike.setdefault(round(bits, 2), []).append(each)
    found = [
        LinearStorage(
            bits,
            sum(max(1, len(each.spec.part_names)) for each in inside),
            tuple(dict.fromkeys(name for each in inside for name in _last_names(each.spec))),
            sum(each.num_bytes for each in inside),
        )
        for bits, inside in alike.items()
    ]
    return tuple(sorted(found, key=lambda storage: -storage.num_bytes))


def token_bytes(model: Layer, dtype: str) -> int:
    """Bytes of linear layers that a decode step of one token reads."""
    return round(sum(each.num_bytes * each.share for each in linear_reads(model, dtype)))


def linear_reads(model: Layer, dtype: str) -> Iterator[LinearRead]:
    """Every linear layer; arguments as :func:`linear_storage`'s."""
    for path, piece in [("", model), *walk(model)]:
        is_head = path.rpartition(".")[2] == HEAD
        if isinstance(piece, Linear | QuantizedTiedLinear | QuantizedTableHead):
            yield LinearRead(piece.spec, _bytes(piece.spec, piece.method, dtype), 1.0, is_head)
        elif isinstance(piece, TiedLinear):  # the embedding is read as the head
            spec = piece.spec
            size = spec.in_features * spec.out_features * _itemsize(dtype)
            yield LinearRead(spec, size, 1.0, is_head)
        children = [child for _, child in piece.children()]
        chosen = [child.routing.top_k for child in children if isinstance(child, Router)]
        for child in children:
            if isinstance(child, Experts):
                share = min(1.0, (chosen[0] if chosen else 1) / len(child.halves))
                for half in (half for pair in child.halves for half in pair):
                    yield LinearRead(half.spec, _bytes(half.spec, half.method, dtype), share)


def _bytes(spec: LinearSpec, method: LinearMethod, dtype: str) -> int:
    kept = method.kept_bytes(spec)
    if kept is not None:
        return kept
    return sum(
        math.prod(tensor.shape) * _itemsize(tensor.dtype or dtype)
        for tensor in method.create(spec).values()
        if tensor.required
    )


def _itemsize(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size


def _last_names(spec: LinearSpec) -> list[str]:
    return [name.rpartition(".")[2] for name in spec.part_names or (spec.name,)]
