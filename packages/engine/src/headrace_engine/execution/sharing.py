"""Layers that read another layer's cache instead of one of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping

from headrace_core.attention import AttentionLayerSpec
from headrace_core.errors import ConfigError
from headrace_core.model import AttentionLayer


def cache_owners(layers: Mapping[str, AttentionLayer]) -> dict[str, str]:
    """The owner of the cache that each layer is bound to, by name: most own theirs, some have none.

    Args:
        layers: of the model, in execution order.

    Raises:
        ConfigError: a ``kv_sharing_target`` that is no layer before it of the same kind with a cache
            of its own.
    """
    owners: dict[str, str] = {}
    for name, layer in layers.items():
        target = layer.spec.kv_sharing_target
        if target is not None:
            _check_target(layer.spec, target, layers, owners)
            owners[name] = target
        elif layer.kv_spec is not None:
            owners[name] = name
    return owners


def _check_target(
    spec: AttentionLayerSpec,
    target: str,
    layers: Mapping[str, AttentionLayer],
    before: Mapping[str, str],
) -> None:
    """``before``: owners of the layers that come before."""
    wrong = _why_not(spec, target, layers, before)
    if wrong:
        raise ConfigError(
            f"layer {spec.name!r} shares the KV cache of layer {target!r}, which {wrong}",
            field="kv_sharing_target",
        )


def _why_not(
    spec: AttentionLayerSpec,
    target: str,
    layers: Mapping[str, AttentionLayer],
    before: Mapping[str, str],
) -> str:
    if target == spec.name:
        return "cannot be the same as the current layer"
    if target not in layers:
        late = _index(spec.name) <= _index(target)
        return (
            "must come before the current layer"
            if late
            else "is not an attention layer of the model"
        )
    ours, theirs = _kind(spec), _kind(layers[target].spec)
    if ours != theirs:
        return f"must be the same type as the current layer ({ours}), not {theirs}"
    if target not in before:
        return "must come before the current layer"
    if before[target] != target:
        return "has no cache of its own"
    return ""


def _kind(spec: AttentionLayerSpec) -> str:
    """The kind of a cache: what is stored, and for how long."""
    kind = f"{spec.attention_type} of {spec.num_kv_heads} x {spec.head_dim}"
    if spec.sliding_window is not None:
        kind += f", window {spec.sliding_window}"
    if "attention_chunk" in spec.extras:
        kind += f", chunks of {spec.extras['attention_chunk']}"
    return kind


def _index(name: str) -> int:
    """The first number in a layer's name; 0 without any."""
    found = re.search(r"\d+", name)
    return int(found.group()) if found else 0
