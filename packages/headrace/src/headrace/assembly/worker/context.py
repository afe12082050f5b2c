"""Quantization and attention of a model that is built."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.assembly.parallel.context_parallel import key_sharing
from headrace.assembly.parallel.prefill_context import dividing
from headrace.assembly.resolved import ResolvedConfig
from headrace_attention.selection import BackendChooser, choose_backend
from headrace_core.attention import (
    AttentionBackend,
    AttentionNeed,
    BackendFacts,
    EncoderBackend,
)
from headrace_core.errors import ConfigError, PluginError
from headrace_core.model import BuildContext
from headrace_core.ops import OpTable

if TYPE_CHECKING:
    from headrace.assembly.parallel.experts import DividedMixtures
    from headrace.assembly.parallel.ranks import Ranks
    from headrace_core.lora import AdapterSlots
    from headrace_engine.encoder.slices import EncoderSlices


def backend_chooser(resolved: ResolvedConfig, ops: OpTable) -> BackendChooser:
    """Chooses the backends of one model's layers."""
    config, _, platform, _ = resolved
    return BackendChooser(ops, wanted=config.attention.backend, preferred=platform.attention_order)


def tower_chooser(
    resolved: ResolvedConfig, ops: OpTable, choose: Callable[[AttentionNeed], BackendFacts]
) -> Callable[[AttentionNeed], BackendFacts]:
    """Chooses the backends of layers without a cache: of towers, the one that the operator names for them.

    Args:
        choose: what chooses otherwise.

    Raises:
        ConfigError: the model has no towers.
    """
    wanted, field = (
        resolved.config.multimodal.mm_encoder_attn_backend, "multimodal.mm_encoder_attn_backend"
    )  # fmt: skip
    if wanted is None:
        return choose
    if not resolved.info.processor:
        raise ConfigError(
            f"{field} = {wanted!r}: must be left out: the model has no towers for media",
            field=field,
        )
    made: dict[AttentionNeed, BackendFacts] = {}

    def of_tower(need: AttentionNeed) -> BackendFacts:
        if need.attention_type != "encoder":
            return choose(need)
        if need not in made:
            try:
                made[need] = choose_backend(need, wanted=wanted)(ops)
            except ConfigError as error:
                raise ConfigError(f"{field}: {error}", field=field) from error
        return made[need]

    return of_tower


def build_context(
    resolved: ResolvedConfig,
    ops: OpTable,
    choose: Callable[[AttentionNeed], BackendFacts],
    slices: EncoderSlices | None = None,
    adapters: AdapterSlots | None = None,
    ranks: Ranks | None = None,
    experts: DividedMixtures | None = None,
) -> BuildContext:
    """Build context of a model on one rank.

    Args:
        choose: the backend of each layer.
        slices: where towers pause; None: they never do.
        adapters: see :func:`build_model`.
        ranks: likewise.
        experts: likewise.
    """
    from headrace_core.parallel import SingleProcess
    from headrace_models.quantization import quant_method
    from headrace_models.stages.division import PARTITION

    config, info, platform, _ = resolved
    assert config.cache.block_size is not None
    uncached = tower_chooser(resolved, ops, choose)
    sharing, cut = key_sharing(config, ops, ranks), dividing(ops, ranks)
    return BuildContext(
        config=info.config,
        dtype=info.dtype,
        device=platform.device,
        ops=ops,
        quant=quant_method(
            info,
            config.model.quantization,
            ops,
            device=platform.device,
            device_capability=_capability(platform.device),
            overrides=config.model.quantization_overrides,
            activations=config.model.quantization_activations,
        ),
        communicator=SingleProcess() if ranks is None else ranks.communicator(),
        attention=lambda need: cut(need, sharing(need, _paged(choose(need)))),
        encoder_attention=lambda need: _pausing(_without_cache(uncached(need)), need, slices),
        block_size=config.cache.block_size,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        max_model_len=info.max_model_len,
        pooling=info.pooling,
        path=info.path,
        whole_config=info.whole_config,
        generation_config=info.generation_config,
        trust_remote_code=info.trust_remote_code,
        adapters=adapters,
        experts=None if experts is None else experts.division,
        stage=None if ranks is None else ranks.stages(os.environ.get(PARTITION)),
    )


def _capability(device: str) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU; None: another device."""
    import torch

    if device != "cuda" or torch.version.cuda is None:
        return None
    return torch.cuda.get_device_capability()


def _paged(backend: BackendFacts) -> AttentionBackend:
    if not isinstance(backend, AttentionBackend):
        raise PluginError(f"attention backend {backend.name!r} is not an AttentionBackend")
    return backend


def _without_cache(backend: BackendFacts) -> EncoderBackend:
    if not isinstance(backend, EncoderBackend):
        raise PluginError(f"attention backend {backend.name!r} is not an EncoderBackend")
    return backend


def _pausing(
    backend: EncoderBackend, need: AttentionNeed, slices: EncoderSlices | None
) -> EncoderBackend:
    """A tower's backend, with pauses."""
    if slices is None or need.attention_type != "encoder":
        return backend
    from headrace_engine.encoder.slices import PausingBackend

    return PausingBackend(backend, slices.pause)
