"""Decode context parallelism: what it asks of settings and of a model, and a model's layers set up for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace_core.errors import ConfigError
from headrace_core.kv import CacheSpec, FullAttentionSpec, MLASpec
from headrace_core.model import SupportsRecurrence
from headrace_engine.speculation.config import BY_MODEL

if TYPE_CHECKING:
    from headrace.assembly.parallel.ranks import Ranks
    from headrace_core.attention import AttentionBackend, AttentionNeed
    from headrace_core.model import CausalLM
    from headrace_core.ops import OpTable
    from headrace_core.platform import Platform
    from headrace_engine.config import EngineConfig

FIELD = "parallel.decode_context_parallel_size"


def check_context_parallel(config: EngineConfig, platform: Platform) -> None:
    """Refuse settings that do not go with decode context parallelism.

    Raises:
        ConfigError: naming the setting.
    """
    ranks = config.parallel.decode_context_parallel_size
    if ranks == 1:
        return
    interleave = config.parallel.cp_kv_cache_interleave_size
    block_size = config.cache.block_size or platform.default_block_size
    if block_size % interleave:
        raise ConfigError(
            f"parallel.cp_kv_cache_interleave_size = {interleave}: must divide cache.block_size = "
            f"{block_size}",
            field="parallel.cp_kv_cache_interleave_size",
        )
    speculative = config.speculative
    if speculative.method in BY_MODEL or speculative.model is not None:
        name = "model" if speculative.method is None else "method"
        raise ConfigError(
            f"speculative_config.{name} = {getattr(speculative, name)!r}: must be left out, or a method that "
            f"caches nothing (ngram, suffix), with {FIELD} = {ranks}: layers that guess keep all tokens",
            field=f"speculative_config.{name}",
        )


def key_sharing(
    config: EngineConfig, ops: OpTable, ranks: Ranks | None
) -> Callable[[AttentionNeed, AttentionBackend], AttentionBackend]:
    """Gives a layer the backend that shares keys with other ranks, in place of the one that was chosen for
    it; that one itself, where nothing is shared."""
    if ranks is None or not ranks.share_keys:
        return lambda need, backend: backend
    from headrace_attention.context_parallel import KeySharingChooser

    interleave = config.parallel.cp_kv_cache_interleave_size
    return KeySharingChooser(ops, ranks.context_group(), interleave)


def share_blocks(model: CausalLM, size: int) -> None:
    """Have each block of a model's cache be shared by ``size`` ranks: before the cache is planned.

    Raises:
        ConfigError: a layer caches something else than keys of all tokens, or too few ranks keep the same;
            or nothing is known of the model's layers yet (code of transformers), or nothing is cached.
    """
    if isinstance(model, SupportsRecurrence) and model.state_layers():
        name = next(iter(model.state_layers()))
        raise _refusal(
            size, f"layer {name!r} keeps a state of fixed size, which ranks do not share"
        )
    layers = model.attention_layers()
    if all(layer.kv_spec is None for layer in layers.values()):
        raise _refusal(size, "the model names no layers with a cache before its weights are read")
    for name, layer in layers.items():
        if layer.kv_spec is not None:
            copies: Any = getattr(layer, "kv_copies", None)
            _check(name, layer.kv_spec, copies, size)
            block_size = layer.kv_spec.block_size * size
            layer.kv_spec = dataclasses.replace(layer.kv_spec, block_size=block_size, ranks=size)


def _check(name: str, spec: CacheSpec, copies: int | None, size: int) -> None:
    if type(spec) not in (FullAttentionSpec, MLASpec):
        kind = type(spec).__name__.removesuffix("Spec")
        raise _refusal(
            size, f"the cache of layer {name!r} ({kind}) does not hold keys of all tokens"
        )
    if copies is None:
        raise _refusal(size, f"layer {name!r} does not say how many ranks keep the same keys")
    if copies % size:
        raise _refusal(
            size,
            f"each key-value head of layer {name!r} is kept by {copies} of the ranks; "
            "must be a divisor of that number",
        )


def _refusal(size: int, why: str) -> ConfigError:
    return ConfigError(f"{FIELD} = {size}: {why}", field=FIELD)
