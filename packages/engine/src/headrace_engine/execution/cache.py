"""Allocating the paged cache and handing it to the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace_core.attention import AttentionBackend
from headrace_core.errors import ConfigError
from headrace_core.kv import CrossAttentionSpec, KVCacheConfig
from headrace_core.model import AttentionLayer

_TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


def bind_cache(
    layers: Mapping[str, AttentionLayer], config: KVCacheConfig, device: torch.device
) -> list[Tensor]:
    """Allocate one zeroed tensor per layer of a group and bind the j-th to each group's j-th layer.

    The tensors are bytes, seen by each layer in its own logical shape over its backend's physical
    order. On a CPU zeroed memory is taken from the system when it is first written, so a large
    cache costs what is used of it.

    Returns:
        the tensors, uint8, each with all blocks in ascending order.

    Raises:
        ConfigError: layers that share a tensor lay it out differently.
    """
    buffers = []
    page_bytes = max((group.spec.page_bytes for group in config.groups), default=0)
    for j in range(config.num_layers_per_group):
        buffer = _zeroed_bytes(config.num_blocks * page_bytes, device)
        buffers.append(buffer)
        sharing = [
            (index, layers[group.layer_names[j]])
            for index, group in enumerate(config.groups)
            if j < len(group.layer_names)
        ]
        _check_same_layout([layer for _, layer in sharing])
        for index, layer in sharing:
            layer.bind_cache(_view(buffer, layer, config.num_blocks), index)
    return buffers


def clear_blocks(
    buffers: Sequence[Tensor],
    layers: Mapping[str, AttentionLayer],
    config: KVCacheConfig,
    blocks: slice,
) -> None:
    """Zero these blocks in all of the tensors that :func:`bind_cache` returned."""
    for j, buffer in enumerate(buffers):
        name = next(g.layer_names[j] for g in config.groups if j < len(g.layer_names))
        # Where a block lies is the same for all layers that share a tensor.
        _view(buffer, layers[name], config.num_blocks)[:, blocks].zero_()


def _zeroed_bytes(size: int, device: torch.device) -> Tensor:
    """[size] uint8. On a CPU through numpy, which asks the system for zeroed pages; torch would
    write the zeros itself, which takes a second per gigabyte and makes all of it resident."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(size, np.uint8))
    return torch.zeros(size, dtype=torch.uint8, device=device)


def cross_groups(config: KVCacheConfig) -> list[int]:
    """Groups whose blocks hold encoder states."""
    groups = enumerate(config.groups)
    return [g for g, group in groups if isinstance(group.spec, CrossAttentionSpec)]


def group_backends(
    layers: Mapping[str, AttentionLayer], config: KVCacheConfig
) -> list[AttentionBackend]:
    """The backend of each group's layers.

    Raises:
        ConfigError: layers of one group have different ones; they could not share metadata.
    """
    backends = []
    for group in config.groups:
        found = {id(layers[name].backend): layers[name].backend for name in group.layer_names}
        if len({type(backend) for backend in found.values()}) != 1:
            names = sorted(type(backend).name for backend in found.values())
            raise ConfigError(
                f"layers {list(group.layer_names)} share a cache group but have different "
                f"attention backends: {names}",
                field="attention.backend",
            )
        backends.append(next(iter(found.values())))
    return backends


def _view(buffer: Tensor, layer: AttentionLayer, num_blocks: int) -> Tensor:
    """The buffer as the layer's backend sees it: logical shape, physical order."""
    spec = layer.kv_spec
    assert spec is not None
    shape = layer.backend.cache_shape(spec, num_blocks)
    order = layer.backend.cache_stride_order()
    physical = [shape[i] for i in order]
    typed = buffer[: num_blocks * spec.page_bytes].view(_TORCH_DTYPES[spec.dtype])
    return typed.view(physical).permute([order.index(i) for i in range(len(order))])


def _check_same_layout(layers: list[AttentionLayer]) -> None:
    """Blocks of one tensor belong to several groups: they must lie at the same bytes in each."""
    orders = {tuple(layer.backend.cache_stride_order()) for layer in layers}
    pages = {layer.kv_spec.page_bytes for layer in layers if layer.kv_spec is not None}
    if len(orders) > 1 or len(pages) > 1:
        names = [layer.spec.name for layer in layers]
        raise ConfigError(
            f"layers {names} share a cache tensor but lay it out differently: orders "
            f"{sorted(orders)}, page sizes {sorted(pages)} bytes",
            field="attention.backend",
        )
