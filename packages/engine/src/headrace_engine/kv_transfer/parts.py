"""Parts of blocks: each rank saves and loads the layers that it has, and of these the heads that it has.

A block of a cache group is divided along its key-value heads into equal parts, each with a key of its own. A
rank has one or more neighbouring ones; several ranks have the same if there are fewer heads than ranks, and
all have the only one of latent attention. Where stages have other layers, a part is those of one stage, or
one layer alone (``kv_by_layer``). A part holds the same bytes whichever number of ranks made it, so engines
with other numbers of ranks read it, if both divide blocks in the same way.

Layers that guess are parts of their own: of a head they belong to the block, as its guesses are made from
them; those of a draft model, which computes what it lacks, stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from headrace_core.errors import ConfigError
from headrace_core.kv import KVCacheConfig, KVCacheSpec, MLASpec
from headrace_core.model import AttentionLayer
from headrace_engine.kv_transfer.settings import FIELD
from headrace_engine.speculation.layer_names import DRAFT_PREFIX

PARTS = "kv_head_parts"


class LayerParts(Enum):
    """Layers of one part."""

    ALL = "all"
    STAGE = "stage"
    EACH = "each"


@dataclass(frozen=True)
class Division:
    """How an engine divides blocks, and one rank's place among those that have the same layers."""

    head_parts: int | None = None
    """Parts along the heads (``kv_head_parts``); a group with fewer heads has one for each. None: as few as
    the ranks allow."""
    rank: int = 0
    num_ranks: int = 1
    layers: LayerParts = LayerParts.ALL
    guesses: str | None = None
    """Names the head whose layers belong to a block; None: layers that guess do not."""


class BlockPart(NamedTuple):
    """A part of a block that a rank has."""

    layers: tuple[str, ...]
    mark: str = ""
    """Stands in its key; see :func:`~headrace_engine.kv_transfer.rank_blocks.part_key`."""
    share: int = 0
    """Which of the equal shares of the rank's heads it is."""
    shares: int = 1
    """How many these are."""


class GroupParts(NamedTuple):
    """One rank's parts of the blocks of a cache group."""

    parts: tuple[BlockPart, ...] = ()
    times: int = 1
    """Heads of all ranks over those of this one, ranks with the same heads counted once."""


def parts_of_groups(
    layers: Mapping[str, AttentionLayer], config: KVCacheConfig, division: Division = Division()
) -> tuple[GroupParts, ...]:
    """Parts by cache group, of one rank.

    Args:
        layers: of this rank.
        config: the cache with these layers; a group may have none.

    Raises:
        ConfigError: heads cannot be divided so, or a layer does not say which ranks keep the same.
    """
    return tuple(_parts_of(group.layer_names, layers, division) for group in config.groups)


def _parts_of(
    names: tuple[str, ...], layers: Mapping[str, AttentionLayer], division: Division
) -> GroupParts:
    own, guessing = (
        models_layers(names),
        tuple(name for name in names if name.startswith(DRAFT_PREFIX)),
    )
    found: list[BlockPart] = []
    times = 1
    if own:
        total, first, here = _head_parts(own[0], layers[own[0]], division)
        times = total // here
        found = [
            BlockPart(some, " ".join(filter(None, (mark, of_heads))), share, here)
            for some, mark in _layer_parts(own, division.layers)
            for share, of_heads in enumerate(_marks_of_heads(total, first, here))
        ]
    if guessing and division.guesses is not None:
        mark = f"guesses {division.guesses}: {','.join(guessing)}"
        found.append(BlockPart(guessing, mark))
    return GroupParts(tuple(found), times)


def models_layers(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of a group's layers that are the model's own, and guess nothing."""
    return tuple(name for name in names if not name.startswith(DRAFT_PREFIX))


def whole_spec(spec: Any, parts: GroupParts) -> Any:
    """A cache specification with the heads of all ranks, so that it is equal on any number of them."""
    if not isinstance(spec, KVCacheSpec) or isinstance(spec, MLASpec):
        return spec
    return replace(spec, num_kv_heads=spec.num_kv_heads * parts.times)


def _layer_parts(names: tuple[str, ...], kind: LayerParts) -> list[tuple[tuple[str, ...], str]]:
    """Layers, and their marks."""
    if kind is LayerParts.ALL:
        return [(names, "")]
    some = [names] if kind is LayerParts.STAGE else [(name,) for name in names]
    return [(one, f"layers {','.join(one)}") for one in some]


def _marks_of_heads(total: int, first: int, here: int) -> list[str]:
    if total == 1:
        return [""]
    return [f"part {one} of {total}" for one in range(first, first + here)]


def _head_parts(name: str, layer: AttentionLayer, division: Division) -> tuple[int, int, int]:
    """Parts along the heads, the first that the rank has, and how many it has."""
    stated, num_ranks = division.head_parts, division.num_ranks
    heads, copies = _heads(name, layer, num_ranks)
    shards = num_ranks // copies
    total = heads * shards
    count = min(stated or shards, total)
    if count % shards or total % count:
        accepted = [n for n in range(shards, total + 1, shards) if total % n == 0]
        raise ConfigError(
            f"{FIELD}.{PARTS} = {stated}: layer {name!r} has {total} key-value heads on {num_ranks} "
            f"ranks: must be one of {', '.join(map(str, accepted))}",
            field=f"{FIELD}.{PARTS}",
        )
    here = count // shards
    return count, division.rank // copies * here, here


def _heads(name: str, layer: AttentionLayer, num_ranks: int) -> tuple[int, int]:
    """Heads that a rank has, and ranks that have the same."""
    spec = layer.kv_spec
    assert spec is not None
    if num_ranks == 1 or isinstance(spec, MLASpec):
        return spec.num_kv_heads, num_ranks
    copies: Any = getattr(layer, "kv_copies", None)
    if copies is None:
        raise ConfigError(
            f"{FIELD}: must be left out for this model while tensor_parallel_size = {num_ranks}: layer "
            f"{name!r} does not say which ranks keep the same heads",
            field=FIELD,
        )
    return spec.num_kv_heads, copies
