"""Settings of adapters where a checkpoint has some of its own, for prompts with media."""

from __future__ import annotations

import logging
from dataclasses import replace

from headrace_core.model import ModelInfo
from headrace_engine.config import EngineConfig
from headrace_engine.lora.config import RANKS

logger = logging.getLogger(__name__)


def with_own_adapters(config: EngineConfig, info: ModelInfo) -> EngineConfig:
    """With slots for the adapters that lie beside the checkpoint's weights, and each given to the prompts
    that it is for; unless the operator says whose adapters prompts with media have
    (``lora.default_mm_loras``).

    Raises:
        UnsupportedModel, WeightsError: an adapter's settings cannot be used.
    """
    from headrace_models.lora.beside_weights import own_adapters

    lora = config.lora
    if lora.default_mm_loras:
        return config
    own = own_adapters(info, config.model.limit_mm_per_prompt)
    if not own.paths:
        return config
    number = len(set(own.paths.values()))
    rank = next((rank for rank in RANKS if rank >= own.rank), RANKS[-1])
    slots = lora.max_loras if lora.enable_lora else max(number, lora.max_loras)
    changed = replace(
        lora,
        enable_lora=True,
        max_loras=slots,
        max_lora_rank=max(lora.max_lora_rank, rank),
        max_cpu_loras=max(lora.max_cpu_loras or 0, slots, number),
        default_mm_loras=own.paths,
    )
    logger.info(
        "adapters of the checkpoint: %s; %d slots of rank %d",
        ", ".join(f"{key}: {path}" for key, path in own.paths.items()),
        changed.max_loras,
        changed.max_lora_rank,
    )
    return replace(config, lora=changed)
