"""Sorting a model's layers into cache groups (see :mod:`headrace_core.kv`)."""

from __future__ import annotations

from collections.abc import Mapping

from headrace_core.errors import ConfigError
from headrace_core.kv import CrossAttentionSpec, KVCacheGroup, KVCacheSpec


def plan_groups(specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Cut layers into groups of equal spec and, as far as possible, equal layer count.

    A block takes one page in each of ``num_layers_per_group`` tensors, so a group with fewer layers
    than the largest wastes the rest of its blocks. The group size is the one, between the smallest
    and the largest number of layers of a kind, that wastes the fewest pages; of equals the largest,
    which needs the fewest block tables.

    Args:
        specs: by layer name, in execution order.

    Returns:
        One group if all layers are alike; otherwise the groups of each kind, kinds in the order of
        their first layer (cross-attention last), layers in execution order.

    Raises:
        ConfigError: no layers; pages or block sizes differ in size.
    """
    kinds: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        kinds.setdefault(spec, []).append(name)
    _check_pages(kinds)
    ordered = sorted(kinds, key=lambda spec: isinstance(spec, CrossAttentionSpec))
    size = _group_size([len(names) for names in kinds.values()])
    return tuple(
        KVCacheGroup(tuple(part), spec)
        for spec in ordered
        for part in _even_parts(kinds[spec], -(-len(kinds[spec]) // size))
    )


def _check_pages(kinds: Mapping[KVCacheSpec, list[str]]) -> None:
    if not kinds:
        raise ConfigError("KV cache: the model has no attention layers that use one")
    first, *others = kinds
    for spec in others:
        for what in ("block_size", "page_bytes"):
            ours, theirs = getattr(first, what), getattr(spec, what)
            if ours != theirs:
                raise ConfigError(
                    f"KV cache: {what} of layer {kinds[first][0]!r} is {ours}, of layer "
                    f"{kinds[spec][0]!r} {theirs}: all layers draw from one pool and must agree"
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
