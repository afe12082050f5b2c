"""Measuring the scales of a one-byte cache, once, before the first request.

One forward pass over tokens that are always the same ones. Each layer looks at the keys and values
that it is about to store, takes its scales from their largest, and goes on with them, so that later
layers see what they will see in service. From then on the scales are constants: what a request gets
does not depend on which request came first, blocks of the prefix cache keep their meaning, and
recorded steps may hold the scales' addresses.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from headrace_core.attention import LARGEST, AttentionLayerSpec, KVScaleMeasure
from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.errors import ConfigError, ModelError
from headrace_core.kv import NULL_BLOCK, KVCacheConfig
from headrace_core.model import AttentionLayer, MeasuresKVScales
from headrace_engine.execution.scale_constants import ScaleConstants
from headrace_engine.kv.states import state_groups

logger = logging.getLogger(__name__)

MEASURED_TOKENS = 256
"""Length of the prompt that is measured, where context and cache hold as much."""
_SEED = 20261121


class MeasuringBatch(NamedTuple):
    """One prompt in blocks of its own."""

    batch: ForwardBatch
    """Without attention metadata; the logits of its last row are wanted."""
    blocks: tuple[slice, ...]
    """By pool: the blocks that it writes to, of all of its groups."""


def measuring_batch(
    cache: KVCacheConfig, *, vocab_size: int, max_model_len: int, device: torch.device
) -> MeasuringBatch:
    """A prompt of random tokens, the same ones for a model whatever else is configured.

    Its length is not cut to ``max_num_batched_tokens``: that is a setting of speed, and outputs
    must not depend on it.
    """
    block_size, pools = cache.block_size, range(len(cache.pools))
    shares = [(cache.pools[pool] - 1) // len(cache.groups_of(pool)) for pool in pools]
    states = state_groups(cache)
    room = [shares[group.pool] for g, group in enumerate(cache.groups) if g not in states]
    num_tokens = min(MEASURED_TOKENS, max_model_len, min(room) * block_size)
    num_blocks = -(-num_tokens // block_size)
    positions = torch.arange(num_tokens, device=device)
    first = [NULL_BLOCK + 1 for _ in pools]
    groups = []
    for g, group in enumerate(cache.groups):
        start = first[group.pool]
        if g in states:
            groups.append(_fresh_state(start, device))
            first[group.pool] += 1
            continue
        table = start + torch.arange(num_blocks, dtype=torch.int32, device=device)
        slots = table.long()[positions // block_size] * block_size + positions % block_size
        groups.append(GroupBatch(table[None], slots))
        first[group.pool] += num_blocks
    generator = torch.Generator().manual_seed(_SEED)
    batch = ForwardBatch(
        input_ids=torch.randint(vocab_size, (num_tokens,), generator=generator).to(device),
        positions=positions,
        cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        max_seqlen_q=num_tokens,
        max_seqlen_k=num_tokens,
        groups=tuple(groups),
        logits_rows=positions[-1:],
    )
    return MeasuringBatch(batch, tuple(slice(NULL_BLOCK + 1, end) for end in first))


def _fresh_state(block_id: int, device: torch.device) -> GroupBatch:
    """The states of a prompt that begins without one and leaves one in this block."""
    return GroupBatch(
        torch.zeros((1, 0), dtype=torch.int32, device=device),
        torch.zeros(0, dtype=torch.int64, device=device),
        state_in=torch.tensor([-1], device=device),
        state_out=torch.tensor([block_id], device=device),
    )


def one_byte_layers(layers: Mapping[str, AttentionLayer]) -> list[AttentionLayer]:
    """Those whose cache has one byte a number, in execution order.

    Raises:
        ConfigError: there are none, so that nothing can be measured.
    """
    specs = ((layer, layer.kv_spec) for layer in layers.values())
    found = [layer for layer, spec in specs if spec is not None and spec.dtype in LARGEST]
    if not found:
        raise ConfigError(
            "cache.calculate_kv_scales = True: no layer of the model caches keys and values in one "
            "byte; leave it and cache.kv_cache_dtype out",
            field="cache.calculate_kv_scales",
        )
    return found


def measure_kv_scales(
    layers: Mapping[str, AttentionLayer], constants: ScaleConstants, run: Callable[[], object]
) -> None:
    """Give every layer that caches in one byte its scales; logs their range and the time it took.

    Args:
        layers: of the model, their caches bound.
        constants: what the largest key and value of a layer are to be stored as.
        run: one forward pass, with real slots (:func:`measuring_batch`).

    Raises:
        ConfigError: a layer cannot be measured (names it and its class), or there is none to measure.
        ModelError: a layer's keys or values are not finite, or the pass did not come by a layer.
    """
    start = time.perf_counter()
    one_byte = {layer.spec.name: _measurable(layer) for layer in one_byte_layers(layers)}
    found: dict[str, AttentionLayerSpec] = {}

    def measure(spec: AttentionLayerSpec, key: Tensor, value: Tensor) -> AttentionLayerSpec:
        found[spec.name] = dataclasses.replace(
            spec,
            k_scale=_scale(key, constants.k, f"keys of layer {spec.name!r}"),
            v_scale=_scale(value, constants.v, f"values of layer {spec.name!r}"),
        )
        return found[spec.name]

    _run_measuring(list(one_byte.values()), measure, run)
    missing = [name for name in one_byte if name not in found]
    if missing:
        raise ModelError(f"cache scales: the model's forward pass did not come by layers {missing}")
    logger.info(
        "cache scales of %d layers, measured in %.3f s: keys %s, values %s",
        len(found),
        time.perf_counter() - start,
        _range([spec.k_scale for spec in found.values()]),
        _range([spec.v_scale for spec in found.values()]),
    )


def _measurable(layer: AttentionLayer) -> MeasuresKVScales:
    if not isinstance(layer, MeasuresKVScales):
        raise ConfigError(
            f"cache.calculate_kv_scales: layer {layer.spec.name!r} is a "
            f"{type(layer).__qualname__}, which has no measure_kv_scales "
            "(headrace_core.model.MeasuresKVScales); use cache.kv_cache_dtype 'auto', or 'fp8' "
            "without calculate_kv_scales",
            field="cache.calculate_kv_scales",
        )
    return layer


def _run_measuring(
    layers: list[MeasuresKVScales], measure: KVScaleMeasure, run: Callable[[], object]
) -> None:
    try:
        for layer in layers:
            layer.measure_kv_scales(measure)
        run()
    finally:
        for layer in layers:
            layer.measure_kv_scales(None)


def _scale(x: Tensor, constant: float, what: str) -> Tensor:
    """x [T, Hk, D] -> [Hk] float32, the same for every head.

    1 where the largest magnitude is 0 (a layer that the checkpoint has switched off, say), or so
    small that the quotient is: every stored value is 0 then, whatever the scale, and ops divide by
    it.

    Raises:
        ModelError: x is not finite.
    """
    largest = float(x.abs().amax())  # NaN if there is one
    if not largest < float("inf"):
        raise ModelError(
            f"cache scales: {what} are not finite in the measuring pass (largest: {largest}); the "
            "checkpoint is broken, or the model needs a dtype of a wider range than it is served in"
        )
    scale = torch.full((x.shape[1],), largest / constant, dtype=torch.float32, device=x.device)
    return torch.where(scale > 0, scale, 1.0)


def _range(scales: list[Tensor | None]) -> str:
    numbers = [float(scale.max()) for scale in scales if scale is not None]
    return f"{min(numbers):.3g} to {max(numbers):.3g}" if numbers else "none"
