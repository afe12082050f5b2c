"""How a model's linear layers are stored, and what one decode step reads of them, from a model not loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from headrace_core.linear import LinearMethod, LinearSpec
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


class _Stored(NamedTuple):
    spec: LinearSpec
    num_bytes: int
    share: float
    """Part of the layer that one token reads: of experts, those that it goes to."""


def linear_storage(model: Layer, dtype: str) -> tuple[LinearStorage, ...]:
    """The model's linear layers by the bits of their weights, the most bytes first.

    Args:
        model: built; loading makes no difference.
        dtype: of floating weights.
    """
    alike: dict[float, list[_Stored]] = {}
    for each in _stored(model, dtype):
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
    return round(sum(each.num_bytes * each.share for each in _stored(model, dtype)))


def _stored(model: Layer, dtype: str) -> Iterator[_Stored]:
    for piece in [model, *(piece for _, piece in walk(model))]:
        if isinstance(piece, Linear | QuantizedTiedLinear | QuantizedTableHead):
            yield _Stored(piece.spec, _bytes(piece.spec, piece.method, dtype), 1.0)
        elif isinstance(piece, TiedLinear):  # the embedding is read as the head
            spec = piece.spec
            yield _Stored(spec, spec.in_features * spec.out_features * _itemsize(dtype), 1.0)
        children = [child for _, child in piece.children()]
        chosen = [child.routing.top_k for child in children if isinstance(child, Router)]
        for child in children:
            if isinstance(child, Experts):
                share = min(1.0, (chosen[0] if chosen else 1) / len(child.halves))
                for half in (half for pair in child.halves for half in pair):
                    yield _Stored(half.spec, _bytes(half.spec, half.method, dtype), share)


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
