"""Storing a step's keys and values, the part that all paged backends share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.attention import AttentionLayerSpec, KVViews
    from headrace_core.ops import OpTable


def store(
    ops: OpTable,
    layer: AttentionLayerSpec,
    key: Tensor | None,
    value: Tensor | None,
    caches: KVViews,
    slot_mapping: Tensor,
) -> None:
    """Write key and value [T', Hk, D] to their slots; nothing if the caller has written them.

    The number of tokens is that of ``slot_mapping`` [T]; rows of key and value past it are padding
    (T' >= T) and are dropped here, so that ops need not know about padding.
    """
    if key is None or value is None:
        if key is not value:
            raise ValueError("key and value must both be given, or neither")
        return
    num_tokens = slot_mapping.shape[0]
    ops.cache_write(
        key[:num_tokens],
        value[:num_tokens],
        caches.key_cache,
        caches.value_cache,
        slot_mapping,
        k_scale=layer.k_scale,
        v_scale=layer.v_scale,
    )
