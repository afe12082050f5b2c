"""Allocating the cache and handing it to the layers."""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace_core.attention import AttentionBackend
from headrace_core.errors import ConfigError
from headrace_core.kv import (
    ROW_SCALE_BYTES,
    STATE_ALIGNMENT,
    CacheSpec,
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLASpec,
    RecurrentSpec,
)
from headrace_core.model import AttentionLayer, StateLayer
from headrace_engine.execution.sharing import cache_owners

_TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int8_per_token_head": torch.int8,
    "int4_per_token_head": torch.uint8,
}

Buffers = list[list[Tensor]]
"""By pool: tensors of bytes, each with all blocks of the pool in ascending order."""


class CacheView(NamedTuple):
    """One layer's cache."""

    numbers: Tensor
    """Tensor that is bound to the layer: in its backend's logical shape, without scales."""
    scales: Tensor | None
    """Scales of rows that have their own: float32 [2, N, S, Hk], or [N, S, 2] of MLA; else None."""


def cache_specs(
    layers: Mapping[str, AttentionLayer], states: Mapping[str, StateLayer]
) -> dict[str, CacheSpec]:
    """By layer's name: those of attention, in execution order, then recurrent ones; layers that cache
    nothing, or in another's place, are left out."""
    specs: dict[str, CacheSpec] = {
        name: layer.kv_spec for name, layer in layers.items() if layer.kv_spec is not None
    }
    return specs | {name: layer.kv_spec for name, layer in states.items()}


def bind_cache(
    layers: Mapping[str, AttentionLayer],
    states: Mapping[str, StateLayer],
    config: KVCacheConfig,
    device: torch.device,
) -> Buffers:
    """Allocate each pool's zeroed tensors and bind them (:func:`bind_buffers`). On a CPU zeroed memory is
    taken from the system when it is first written, so a large cache costs what is used of it.

    Raises:
        ConfigError: as :func:`bind_buffers`.
    """
    buffers = [
        [
            _zeroed_bytes(num_blocks * config.page_bytes(pool), device)
            for _ in range(config.num_tensors(pool))
        ]
        for pool, num_blocks in enumerate(config.pools)
    ]
    bind_buffers(buffers, layers, states, config)
    return buffers


def bind_buffers(
    buffers: Buffers,
    layers: Mapping[str, AttentionLayer],
    states: Mapping[str, StateLayer],
    config: KVCacheConfig,
) -> None:
    """Bind each pool's j-th tensor to its groups' j-th layers.

    The tensors are bytes, seen by each layer in its own logical shape over its backend's physical
    order, or as its states. Scales that stand in a page are those of its layer's ``spec`` from now on.
    Layers that share another's cache get that layer's tensor, scales and group.

    Raises:
        ConfigError: layers that share a tensor lay it out differently; a layer shares the cache of
            one that it cannot; a backend tears the rows apart that have scales.
    """
    owners = cache_owners(layers)
    bound: dict[str, tuple[CacheView, int]] = {}
    for pool, num_blocks in enumerate(config.pools):
        _check_same_layout(layers, config, pool)
        for group in config.groups_of(pool):
            for name, buffer in zip(config.groups[group].layer_names, buffers[pool]):
                if name in states:
                    layer = states[name]
                    layer.bind_states(_states(buffer, layer.kv_spec, num_blocks), group)
                else:
                    bound[name] = (cache_view(buffer, layers[name], num_blocks), group)
    for name, owner in owners.items():
        _bind(layers[name], *bound[owner])


def _bind(layer: AttentionLayer, cache: CacheView, group: int) -> None:
    if cache.scales is not None:
        # Of MLA one tensor, of others two: [2, N, S, Hk].
        k_scale, v_scale = (cache.scales, None) if cache.scales.dim() == 3 else cache.scales
        layer.spec = dataclasses.replace(layer.spec, k_scale=k_scale, v_scale=v_scale)
    layer.bind_cache(cache.numbers, group)


def unbind(layers: Mapping[str, AttentionLayer], states: Mapping[str, StateLayer]) -> None:
    """Take what :func:`bind_cache` gave away from the layers, which compute without it then. Nothing is
    checked: what could not be bound can be let go."""
    for attending in layers.values():
        if attending.kv_spec is not None or attending.spec.kv_sharing_target is not None:
            attending.bind_cache(None, 0)
            if attending.spec.k_scale is not None and attending.spec.k_scale.dim() > 1:
                # Views of the memory that is let go.
                attending.spec = dataclasses.replace(attending.spec, k_scale=None, v_scale=None)
    for layer in states.values():
        layer.bind_states(None, 0)


def clear_blocks(
    buffers: Buffers,
    layers: Mapping[str, AttentionLayer],
    config: KVCacheConfig,
    blocks: Sequence[slice],
) -> None:
    """Zero these blocks of each pool in all tensors of attention layers."""
    for pool, tensors in enumerate(buffers):
        groups = [config.groups[g] for g in config.groups_of(pool)]
        spec, num_blocks = groups[0].spec, config.pools[pool]
        if isinstance(spec, RecurrentSpec):
            continue  # who begins does not read what is there
        for j, buffer in enumerate(tensors):
            if isinstance(spec, MLASpec):
                buffer.view(num_blocks, -1)[blocks[pool]].zero_()
                continue
            name = next(g.layer_names[j] for g in groups if j < len(g.layer_names))
            # Where a block lies is the same for all layers that share a tensor.
            cache_view(buffer, layers[name], num_blocks).numbers[:, blocks[pool]].zero_()


def _zeroed_bytes(size: int, device: torch.device) -> Tensor:
    """[size] uint8, aligned for states. On a CPU the system's zeroed pages; torch would write the zeros
    itself, which takes a second per gigabyte and makes all of it resident."""
    if device.type == "cpu" and size:
        return torch.frombuffer(_pages(size), dtype=torch.uint8)
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _pages(size: int) -> mmap.mmap:
    """Memory of its own, which goes back to the system when nobody refers to it: glibc keeps the free end of
    a thread's arena, up to 64 MiB, whatever malloc_trim(3) is asked.

    Raises:
        MemoryError: the system refuses so much.
    """
    try:
        if hasattr(mmap, "MAP_PRIVATE"):  # shared memory would be a child's as well
            return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return mmap.mmap(-1, size)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size} bytes: {error}") from error


def cross_groups(config: KVCacheConfig) -> list[int]:
    """Groups whose blocks hold encoder states."""
    groups = enumerate(config.groups)
    return [g for g, group in groups if isinstance(group.spec, CrossAttentionSpec)]


def group_backends(
    layers: Mapping[str, AttentionLayer], config: KVCacheConfig
) -> list[AttentionBackend | None]:
    """The backend of each group's layers, those that share their caches included; None of recurrent
    ones, and of a group without layers.

    Raises:
        ConfigError: layers of one group have different ones; they could not share metadata.
    """
    owners = cache_owners(layers)
    backends: list[AttentionBackend | None] = []
    for group in config.groups:
        # A rank may have no layer of a group: one of layers that guess tokens for rank 0.
        if isinstance(group.spec, RecurrentSpec) or not group.layer_names:
            backends.append(None)
            continue
        names = [name for name, owner in owners.items() if owner in group.layer_names]
        found = [layers[name].backend for name in names]
        if len({type(backend) for backend in found}) != 1:
            raise ConfigError(
                f"layers {names} share a cache group but have different attention backends: "
                f"{sorted({type(backend).name for backend in found})}",
                field="attention.backend",
            )
        backends.append(found[0])
    return backends


def cache_view(buffer: Tensor, layer: AttentionLayer, num_blocks: int) -> CacheView:
    """Bytes of ``num_blocks`` pages as the layer's backend sees them: logical shape, physical order.

    Raises:
        ConfigError: rows have scales, and the backend does not keep a row together.
    """
    spec = layer.kv_spec
    assert spec is not None
    shape = layer.backend.cache_shape(spec, num_blocks)
    order = layer.backend.cache_stride_order()
    typed = buffer[: num_blocks * spec.page_bytes].view(_TORCH_DTYPES[spec.dtype])
    numbers, scales = typed.view([shape[i] for i in order]), None
    if spec.row_scales:
        if order[-1] != len(order) - 1:
            raise ConfigError(
                f"cache.kv_cache_dtype = {spec.dtype!r}: attention backend {layer.backend.name!r} does "
                f"not keep a row together (its order is {tuple(order)}), which has a scale",
                field="cache.kv_cache_dtype",
            )
        numbers, scales = split_rows(numbers, spec)
        if scales.dim() < len(order):
            scales = scales.permute([order.index(i) for i in range(scales.dim())])
    return CacheView(numbers.permute([order.index(i) for i in range(len(order))]), scales)


def split_rows(rows: Tensor, spec: KVCacheSpec) -> tuple[Tensor, Tensor]:
    """Physical rows [..., A, ``row_width``] of a storage whose rows have scales, as numbers
    [..., A, ``row_numbers``] and scales float32 [..., A].

    The A neighbours' scales stand together behind their numbers: so numbers begin where the machine's
    lines do, and one line holds the scales of a head's block. Of MLA each row is followed by its two,
    [..., A, 2], as rows are looked up one by one there (``topk_indices``).
    """
    scale_bytes = ROW_SCALE_BYTES * spec.row_scales
    if isinstance(spec, MLASpec):
        return rows[..., : spec.row_numbers], rows[..., -scale_bytes:].view(torch.float32)
    neighbours, width = rows.shape[-2], spec.row_width - scale_bytes
    pieces = rows.flatten(-2)
    numbers = torch.unflatten(pieces[..., : neighbours * width], -1, (neighbours, width))
    scales = pieces[..., neighbours * width :].view(torch.float32)
    return numbers[..., : spec.row_numbers], scales


def _states(buffer: Tensor, spec: RecurrentSpec, num_blocks: int) -> list[Tensor]:
    """Each tensor of the states as [N, *shape]: within a page one after the other, aligned."""
    found, start = [], 0
    for state in spec.states:
        typed = buffer.view(_TORCH_DTYPES[state.dtype])
        size = typed.element_size()
        pages = typed.view(num_blocks, spec.page_bytes // size)
        first, count = start // size, math.prod(state.shape)
        found.append(pages[:, first : first + count].view(num_blocks, *state.shape))
        start += -(-state.num_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT
    return found


def _check_same_layout(
    layers: Mapping[str, AttentionLayer], config: KVCacheConfig, pool: int
) -> None:
    """Blocks of one tensor belong to several groups: they must lie at the same bytes in each."""
    groups = [config.groups[g] for g in config.groups_of(pool)]
    pages = {group.spec.page_bytes for group in groups}
    attending = [group for group in groups if isinstance(group.spec, KVCacheSpec)]
    names = [name for group in attending for name in group.layer_names]
    orders = {tuple(layers[name].backend.cache_stride_order()) for name in names}
    if len(orders) > 1 or len(pages) > 1:
        raise ConfigError(
            f"layers {names} share a pool of blocks but lay it out differently: orders "
            f"{sorted(orders)}, page sizes {sorted(pages)} bytes",
            field="attention.backend",
        )
