"""The layers of a built model that take adapters: those that run on a step's tokens or on rows of logits, and
those of towers for media."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from headrace_models.layers.attention.mla import HeadProjections
from headrace_models.layers.base import Part, Slot, WeightLayer, walk
from headrace_models.layers.decoders.unheard_tokens import ShortHead
from headrace_models.layers.embedding import (
    Embedding,
    PackedEmbedding,
    QuantizedEmbedding,
    QuantizedTableHead,
)
from headrace_models.layers.linear import (
    Linear,
    PlainLinear,
    QuantizedTiedLinear,
    TiedLinear,
)
from headrace_models.layers.moe.experts import GATED_NAMES, Experts
from headrace_models.layers.moe.router import Router
from headrace_models.lora.head_places import HeadsPlace
from headrace_models.lora.places import (
    ExpertsPlace,
    LinearPlace,
    Memory,
    Place,
    TablePlace,
    TowerPlace,
)
from headrace_models.lora.rows import MediaSlot, RowSlots
from headrace_models.lora.sharded_place import ShardedPlace

HEAD, TABLE = "head", "embed"
"""Attributes of a model beside ``layers`` below which layers run on a step's rows, in their order."""
_TOWERS_OFF = (
    "adapters of towers for media, and of their projectors, need enable_tower_connector_lora=True "
    "(--enable-tower-connector-lora)"
)


def find_places(
    model: Any,
    memory: Memory,
    tokens: RowSlots,
    logits: RowSlots | None,
    media: MediaSlot | None = None,
) -> tuple[dict[str, Place], dict[str, str]]:
    """Make places, and give them to the layers as ``low_rank``.

    Args:
        logits: slots of rows of logits; None: the model pools, and slots are chosen of tokens alone.
        media: the slot of media; None: towers and their projectors get no places.

    Returns:
        Places by path of the layer, and reasons why layers have none by name of the layer: where it or
        a layer around it has a reason, ``no_adapters``.
    """
    places: dict[str, Place] = {}
    reasons = {"": getattr(model, "no_adapters", "")}
    by_root = {"layers": tokens, TABLE: tokens, HEAD: logits}
    # Rows of logits are few, and of a whole head one rank alone computes them: no exchange there.
    whole = replace(memory, fully_sharded=False)
    towers = tuple(getattr(model, "media_parts", ()))
    refused: dict[str, str] = {}
    for path, layer in walk(model):
        in_tower = any(f"{path}.".startswith(f"{part}.") for part in towers)
        rows = media if in_tower else by_root.get(path.partition(".")[0])
        reasons[path] = getattr(layer, "no_adapters", "") or _around(path, reasons)
        why = reasons[path] or (_TOWERS_OFF if in_tower and media is None else "")
        maker = (_IN_TOWERS if in_tower else _MAKERS).get(type(layer))
        if why and isinstance(layer, WeightLayer):
            refused |= dict.fromkeys(_names(layer), why)
        elif maker is not None and rows is not None:
            place = maker(layer, whole if rows is logits else memory, rows)
            if place is not None:
                places[path] = layer.low_rank = place  # type: ignore[attr-defined] # each has it
    return places, refused


def _around(path: str, reasons: Mapping[str, str]) -> str:
    """The reason of the nearest layer around, which may lie several names higher (lists)."""
    above = path.rpartition(".")[0]
    while above not in reasons:
        above = above.rpartition(".")[0]
    return reasons[above]


def _names(leaf: Any) -> tuple[str, ...]:
    if isinstance(leaf, Experts):
        specs = [half.spec for half in leaf.every[0]]
        own = [name for spec in specs for name in spec.part_names or (spec.name,)]
        return (leaf.name, *own, *GATED_NAMES)  # also as transformers 5 spells them
    spec = getattr(leaf, "spec", None)
    return (leaf.name, *(spec.part_names if spec is not None else ()))


def _linear(layer: Linear, memory: Memory, rows: RowSlots) -> Place:
    made: Callable[..., Place] = partial(
        TowerPlace if isinstance(rows, MediaSlot) else LinearPlace, memory
    )
    group = layer.communicator
    if memory.fully_sharded and group.world_size > 1:
        made = partial(ShardedPlace, memory, communicator=group)
    return made(
        layer.name,
        rows,
        layer.spec.in_features,
        layer.parts,
        in_shard=layer.in_shard,
        part_names=layer.spec.part_names,
    )


def _whole(name: str, memory: Memory, rows: RowSlots, shape: tuple[int, int]) -> Place:
    return LinearPlace(memory, name, rows, shape[1], (Part(shape[0]),))


def _plain(layer: PlainLinear, memory: Memory, rows: RowSlots) -> Place:
    return _whole(layer.name, memory, rows, layer.shape)


def _tied(
    layer: TiedLinear | QuantizedTiedLinear | QuantizedTableHead, memory: Memory, rows: RowSlots
) -> Place:
    return LinearPlace(memory, layer.name, rows, layer.spec.in_features, (layer.part,))


def _short_head(layer: ShortHead, memory: Memory, rows: RowSlots) -> Place:
    """Tokens without stored rows are another part, which no adapter has."""
    stored, every = layer.rows
    parts = [Part(size) for size in (stored, every - stored) if size]
    return LinearPlace(
        memory,
        layer.name,
        rows,
        layer.size,
        tuple(parts),
        part_names=(layer.name,),
        silent=layer.silent,
    )


def _router(layer: Router, memory: Memory, rows: RowSlots) -> Place:
    if layer.exact:
        memory = replace(memory, like=memory.like.to(torch.float32))
    return _whole(layer.name, memory, rows, (layer.routing.num_experts, layer.hidden_size))


def _table(layer: Embedding | PackedEmbedding, memory: Memory, rows: RowSlots) -> Place:
    beyond = layer.beyond if isinstance(layer, Embedding) else None
    return TablePlace(memory, layer.name, rows, (layer.num_rows, layer.size), beyond)


def _quantized_table(layer: QuantizedEmbedding, memory: Memory, rows: RowSlots) -> Place:
    shape = (layer.num_rows, layer.spec.in_features)
    return TablePlace(memory, layer.name, rows, shape, None)


def _heads(layer: HeadProjections, memory: Memory, rows: RowSlots) -> Place:
    sizes = layer.sizes
    own = sizes.nope_head_dim, sizes.v_head_dim, sizes.kv_lora_rank
    return HeadsPlace(memory, layer.name, rows, layer.part, own)


def _experts(layer: Experts, memory: Memory, rows: RowSlots) -> Place | None:
    weights = {
        half.place: Slot(
            (half.spec.out_features, half.spec.in_features),
            parts=half.parts,
            in_dim=1,
            in_shard=half.in_shard,
        )
        for half in layer.halves[0]
    }
    modules = {
        name: (f"{index}.{half.place}.weight", part)
        for index, pair in enumerate(layer.halves)
        for half in pair
        for part, name in enumerate(half.spec.part_names or (half.spec.name,))
    }
    without = layer.identities
    return ExpertsPlace(memory, layer.name, rows, len(layer.halves), weights, modules, without)


_MAKERS: dict[type[Any], Callable[[Any, Memory, RowSlots], Place | None]] = {
    Linear: _linear, PlainLinear: _plain, TiedLinear: _tied, QuantizedTiedLinear: _tied,
    QuantizedTableHead: _tied, ShortHead: _short_head, Router: _router, Experts: _experts, Embedding: _table,
    PackedEmbedding: _table, HeadProjections: _heads, QuantizedEmbedding: _quantized_table,
}  # fmt: skip
"""Layers of exactly these classes: others do more with their weights than to multiply, or less."""
_IN_TOWERS: dict[type[Any], Callable[[Any, Memory, RowSlots], Place | None]] = {Linear: _linear}
"""Likewise, below towers: convolutions and tables are not there."""
