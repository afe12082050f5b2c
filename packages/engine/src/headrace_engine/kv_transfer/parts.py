"""Parts of blocks: where layers are divided over ranks, each saves and loads the heads that it has.

A block of a cache group is divided along its key-value heads into equal parts, each with a key of its own. A
rank has one or more neighbouring ones; several ranks have the same if there are fewer heads than ranks, and
all have the only one of latent attention. A part holds the same bytes whichever number of ranks made it, so
engines with other numbers of ranks read it, if both divide blocks into as many parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any, NamedTuple

from headrace_core.errors import ConfigError
from headrace_core.kv import KVCacheConfig, KVCacheSpec, MLASpec
from headrace_core.model import AttentionLayer
from headrace_engine.kv_transfer.settings import FIELD

PARTS = "kv_head_parts"


class GroupParts(NamedTuple):
    """Parts of the blocks of one cache group, and those of one rank."""

    total: int = 1
    """Of a whole block."""
    first: int = 0
    """The first one that the rank has."""
    here: int = 1
    """So many it has."""

    def keys(self, key: bytes) -> list[bytes]:
        """Keys of the rank's parts of a block."""
        if self.total == 1:
            return [key]
        own = range(self.first, self.first + self.here)
        return [sha256(key + f"part {one} of {self.total}".encode()).digest() for one in own]


def parts_of_groups(
    layers: Mapping[str, AttentionLayer],
    config: KVCacheConfig,
    stated: int | None = None,
    rank: int = 0,
    num_ranks: int = 1,
) -> tuple[GroupParts, ...]:
    """Parts by cache group, of one rank.

    Args:
        layers: of this rank.
        stated: parts of a block (``kv_head_parts``); a group with fewer heads has one for each. None: as few
            as the ranks allow.

    Raises:
        ConfigError: heads cannot be divided so, or a layer does not say which ranks keep the same.
    """
    found = []
    for group in config.groups:
        name = group.layer_names[0]
        heads, copies = _heads(name, layers[name], num_ranks)
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
        found.append(GroupParts(count, rank // copies * here, here))
    return tuple(found)


def whole_spec(spec: Any, parts: GroupParts) -> Any:
    """A cache specification with the heads of all ranks, so that it is equal on any number of them."""
    if not isinstance(spec, KVCacheSpec) or isinstance(spec, MLASpec):
        return spec
    heads = spec.num_kv_heads * parts.total // parts.here
    return replace(spec, num_kv_heads=heads)


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
