"""How blocks lie in memory, as text: equal texts, equal bytes of equal content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_core.attention import AttentionBackend
from headrace_core.kv import KVCacheConfig
from headrace_engine.kv_transfer.parts import GroupParts, models_layers, whole_spec

Backends = Sequence[AttentionBackend | None]


def layout_of_rank(
    backends: Backends, config: KVCacheConfig, parts: Sequence[GroupParts], facts: tuple[Any, ...]
) -> str:
    """Text of a rank that has all layers, whatever the number of ranks. Layers that guess are left out: they
    have parts of their own.

    Args:
        backends: by cache group.
        facts: about the worker, which the bytes depend on.
    """
    kept = [
        (_order(backend), (names, whole_spec(group.spec, own)))
        for backend, group, own in zip(backends, config.groups, parts, strict=True)
        if (names := models_layers(group.layer_names)) or not group.layer_names
    ]
    orders, specs = [order for order, _ in kept], [spec for _, spec in kept]
    return repr((orders, specs, *facts))


def layouts_of_groups(
    backends: Backends, config: KVCacheConfig, parts: Sequence[GroupParts], facts: tuple[Any, ...]
) -> list[str]:
    """Texts by cache group, whatever layers the rank has of it; "" of a group of which it has none."""
    return [
        repr((_order(backend), whole_spec(group.spec, own), *facts))
        if models_layers(group.layer_names)
        else ""
        for backend, group, own in zip(backends, config.groups, parts, strict=True)
    ]


def merged_layout(reports: Sequence[Mapping[str, Any]]) -> str:
    """Text of an engine whose stages have other layers, by what its ranks report: equal for any stages.

    Groups of layers that guess only have none, and are the last ones.
    """
    by_group = zip(*(one["kv_group_layouts"] for one in reports), strict=True)
    return repr([found for ranks in by_group if (found := sorted({*ranks} - {""}))])


def _order(backend: AttentionBackend | None) -> Any:
    return backend and (backend.name, tuple(backend.cache_stride_order()))
