"""Settings that were left to headrace, chosen: once, in one place, into a new object; and logged."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from headrace_core.errors import ConfigError
from headrace_engine.config import EngineConfig, SchedulerConfig

if TYPE_CHECKING:
    from headrace_core.model import ModelInfo
    from headrace_core.platform import Platform

logger = logging.getLogger(__name__)


def resolve(config: EngineConfig, info: ModelInfo, platform: Platform) -> EngineConfig:
    """Fill in every setting that was left to headrace, and check the parts against each other.

    Returns a new object in which nothing that a component reads is ``None`` or ``"auto"``, except
    where that is itself the meaning (``cache.kv_cache_memory_bytes``).

    Raises:
        ConfigError: two settings, or a setting and the model, contradict each other.
    """
    if info.is_encoder_decoder and config.cache.calculate_kv_scales:
        raise ConfigError(
            "cache.calculate_kv_scales = True: must be False for encoder-decoder models: scales are "
            "measured on text alone",
            field="cache.calculate_kv_scales",
        )
    chosen: dict[str, object] = {}
    _warn_of_windows(info)
    scheduler = _scheduler(config.scheduler, info, platform, chosen)
    block_size = config.cache.block_size
    if block_size is None:
        block_size = chosen["block_size"] = platform.default_block_size
    names = config.model.served_model_name or (config.model.model or info.name,)
    if chosen:
        logger.info("%s", ", ".join(f"{name}: auto -> {value}" for name, value in chosen.items()))
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model,
            dtype=info.dtype,
            max_model_len=info.max_model_len,
            served_model_name=names,
        ),
        cache=dataclasses.replace(
            config.cache,
            block_size=block_size,
            enable_prefix_caching=not config.multimodal.only_encodes
            and _prefix_caching(config.cache.enable_prefix_caching, info),
        ),
        scheduler=scheduler,
        device=dataclasses.replace(config.device, device=platform.device),
    )


def _warn_of_windows(info: ModelInfo) -> None:
    pooling = info.pooling
    if pooling is not None and pooling.enable_chunked_processing and pooling.pooling_type != "MEAN":
        logger.warning(
            "pooler_config.enable_chunked_processing with pooling type %s: the vector of a long text "
            "becomes a mean of its parts' vectors, which suits only type MEAN",
            pooling.pooling_type,
        )


def _prefix_caching(wanted: bool | None, info: ModelInfo) -> bool:
    """True if prefix caching is on; logs the reason if the model does not support it."""
    reason = _no_prefixes(info)
    if not reason:
        return wanted is not False
    if wanted:
        logger.warning("enable_prefix_caching = True has no effect on %s: %s", info.architecture,
                       reason)  # fmt: skip
    else:
        logger.info("prefix caching is off for %s: %s", info.architecture, reason)
    return False


def _no_prefixes(info: ModelInfo) -> str:
    """Why cached beginnings are of no use to a model; "": they are."""
    pooling = info.pooling
    if info.is_encoder_decoder:
        return "its states depend on the encoder's input, not only on the tokens"
    if pooling is None or pooling.reuses_prefixes:
        return ""
    if pooling.causal:
        return f"pooling type {pooling.pooling_type} needs the states of all tokens of a prompt"
    return "its attention looks both ways, so a prompt's beginning depends on its end"


def _whole_prompts(given: SchedulerConfig, info: ModelInfo) -> SchedulerConfig:
    """For a model whose prompts are not cut: no chunks, and steps that hold the longest one."""
    reason = (
        "its prompts are short, but its encoder inputs are long"
        if info.is_encoder_decoder
        else "its attention looks both ways"
    )
    logger.info("chunked prefill is off for %s: %s", info.architecture, reason)
    tokens = given.max_num_batched_tokens
    if tokens is not None and tokens < info.max_model_len:
        logger.info(
            "max_num_batched_tokens: %d -> max_model_len = %d: prompts are computed whole",
            tokens,
            info.max_model_len,
        )
        tokens = info.max_model_len
    return dataclasses.replace(given, enable_chunked_prefill=False, max_num_batched_tokens=tokens)


def _scheduler(
    given: SchedulerConfig, info: ModelInfo, platform: Platform, chosen: dict[str, object]
) -> SchedulerConfig:
    """The scheduler's part; what was chosen is noted in ``chosen``."""
    pooling = info.pooling
    if info.is_encoder_decoder or (pooling is not None and not pooling.chunks):
        given = _whole_prompts(given, info)

    def pick(name: str, default: Any) -> Any:
        value = getattr(given, name)
        if value is None:
            value = chosen[name] = default
        return value

    seqs = pick("max_num_seqs", platform.default_max_num_seqs)
    whole_prompts = 0 if given.enable_chunked_prefill else info.max_model_len
    tokens = pick(
        "max_num_batched_tokens",
        max(platform.default_max_num_batched_tokens, seqs, whole_prompts),
    )
    if given.max_num_seqs is None and seqs > tokens:
        seqs = chosen["max_num_seqs"] = tokens
    # Small steps are for requests that decode beside others' prompts; pooling ones do not.
    small = tokens if pooling is not None else platform.default_max_num_shared_tokens
    shared = pick("max_num_shared_tokens", min(max(small, seqs), tokens))
    if not given.enable_chunked_prefill and tokens < info.max_model_len:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens = {tokens}: must be at least max_model_len = "
            f"{info.max_model_len} while enable_chunked_prefill is off",
            field="scheduler.max_num_batched_tokens",
        )
    threshold = given.long_prefill_token_threshold
    if threshold == 0 and given.max_num_partial_prefills > 1:
        threshold = chosen["long_prefill_token_threshold"] = max(1, info.max_model_len * 4 // 100)
    if threshold > info.max_model_len:
        raise ConfigError(
            f"scheduler.long_prefill_token_threshold = {threshold}: must be at most max_model_len "
            f"= {info.max_model_len}",
            field="scheduler.long_prefill_token_threshold",
        )
    return dataclasses.replace(
        given,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_num_shared_tokens=shared,
        long_prefill_token_threshold=threshold,
        async_scheduling=pick("async_scheduling", True),
    )
