"""Sorting a model's layers into cache groups (see :mod:`headrace_core.kv`)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from headrace_core.errors import ConfigError
from headrace_core.kv import (
    CacheSpec,
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    MLASpec,
    RecurrentSpec,
)


def plan_groups(
    specs: Mapping[str, CacheSpec], stages: Sequence[Collection[str]] = ()
) -> tuple[KVCacheGroup, ...]:
    """Cut layers into groups of equal spec and, within a pool, as equal layer counts as possible.

    Kinds whose pages have the same size, and are laid out in the same way, share a pool. A block takes
    one page in each of a pool's tensors, so a group with fewer layers than the pool's largest wastes
    the rest of its blocks. The group size is the one, between the smallest and the largest number of
    layers of a kind, that wastes the fewest pages; of equals the largest, which needs the fewest block
    tables.

    Args:
        specs: by layer name, in execution order.
        stages: names of the layers that have their caches together, where not all have: each stage has its
            share of every group, so that its pools have few tensors.

    Returns:
        One group for each kind if none is cut; otherwise the groups of each kind, kinds in the order
        of their first layer (cross-attention last), layers in execution order. Pools are numbered by
        their first group.

    Raises:
        ConfigError: no layers; block sizes differ.
    """
    kinds: dict[CacheSpec, list[str]] = {}
    for name, spec in specs.items():
        kinds.setdefault(spec, []).append(name)
    _check_block_sizes(kinds)
    ordered = sorted(kinds, key=lambda spec: isinstance(spec, CrossAttentionSpec))
    pages = list(dict.fromkeys(map(_page, ordered)))
    sizes = [
        _group_size([len(names) for spec, names in kinds.items() if _page(spec) == page])
        for page in pages
    ]
    groups = []
    for spec in ordered:
        pool, names = pages.index(_page(spec)), kinds[spec]
        count = -(-len(names) // sizes[pool])
        shares = [[name for name in names if name in stage] for stage in stages or (names,)]
        parts = [
            list(chain(*part)) for part in zip(*(_even_parts(share, count) for share in shares))
        ]
        groups += [KVCacheGroup(tuple(part), spec, pool) for part in parts]
    return tuple(groups)


def largest_share(
    groups: Sequence[KVCacheGroup], stages: Sequence[Collection[str]]
) -> tuple[KVCacheGroup, ...]:
    """The groups with as many layers of each as the stage with the most has: no stage needs more memory for
    a block than that."""
    found = []
    for group in groups:
        shares = [tuple(name for name in group.layer_names if name in stage) for stage in stages]
        found.append(replace(group, layer_names=max(shares, key=len)))
    return tuple(found)


def of_layers(config: KVCacheConfig, names: Collection[str]) -> KVCacheConfig:
    """The cache with these layers only: a group may have none."""
    own = [tuple(name for name in group.layer_names if name in names) for group in config.groups]
    groups = (replace(group, layer_names=kept) for group, kept in zip(config.groups, own))
    return replace(config, groups=tuple(groups))


def _page(spec: CacheSpec) -> Hashable:
    """The page, which must be equal for blocks to be handed from one group to another: its bytes, and where
    they lie in the tensor. Keys and values may be apart; a state, and a latent, is in one piece."""
    layout = next((kind for kind in (RecurrentSpec, MLASpec) if isinstance(spec, kind)), None)
    return layout, spec.page_bytes


def _check_block_sizes(kinds: Mapping[CacheSpec, list[str]]) -> None:
    if not kinds:
        raise ConfigError("KV cache: the model has no layers that use one")
    first, *others = kinds
    for spec in others:
        if spec.block_size != first.block_size:
            raise ConfigError(
                f"KV cache: block_size of layer {kinds[first][0]!r} is {first.block_size}, of layer "
                f"{kinds[spec][0]!r} {spec.block_size}: they must agree"
            )


def _group_size(counts: list[int]) -> int:
    def padding(size: int) -> int:
        return sum(-count % size for count in counts)

    return min(range(min(counts), max(counts) + 1), key=lambda size: (padding(size), -size))


def _even_parts(names: list[str], num_parts: int) -> list[list[str]]:
    """Consecutive parts whose lengths differ by at most one, longer ones first."""
    quotient, remainder = divmod(len(names), num_parts)
    parts, start = [], 0
    for index in range(num_parts):
        end = start + quotient + (index < remainder)
        parts.append(names[start:end])
        start = end
    return parts
