"""Settings that were left to headrace are chosen once, for the model and the device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from headrace.assembly.resolution import resolve
from headrace_core.errors import ConfigError
from headrace_core.model import ModelInfo
from headrace_core.platform import CpuPlatform
from headrace_core.pooling import PoolingInfo
from headrace_engine.config import CacheConfig, EngineConfig, SchedulerConfig

INFO = ModelInfo(
    name="m", path=Path("/m"), architecture="LlamaForCausalLM", config={}, generation_config={},
    dtype="bfloat16", max_model_len=1000, vocab_size=10, eos_token_ids=(1,),
)  # fmt: skip


def test_resolve_fills_in_and_logs(caplog):
    caplog.set_level("INFO")
    resolved = resolve(EngineConfig(), INFO, CpuPlatform())
    assert resolved.scheduler.max_num_seqs == 128
    assert resolved.scheduler.max_num_batched_tokens == 2048
    assert resolved.scheduler.max_num_shared_tokens == 512
    assert resolved.scheduler.async_scheduling is True
    assert resolved.cache.block_size == 16
    assert resolved.model.dtype == "bfloat16"
    assert resolved.model.max_model_len == 1000
    assert resolved.model.served_model_name == ("m",)
    assert "max_num_seqs: auto -> 128" in caplog.text


def test_without_chunked_prefill_a_step_must_hold_the_longest_prompt():
    off = SchedulerConfig(enable_chunked_prefill=False)
    assert resolve(
        EngineConfig(scheduler=off), INFO, CpuPlatform()
    ).scheduler.max_num_batched_tokens
    small = dataclasses.replace(off, max_num_batched_tokens=999, max_num_seqs=4)
    with pytest.raises(ConfigError, match="max_model_len = 1000"):
        resolve(EngineConfig(scheduler=small), INFO, CpuPlatform())


def test_long_prefill_threshold_defaults_to_four_percent():
    several = SchedulerConfig(max_num_partial_prefills=2)
    resolved = resolve(EngineConfig(scheduler=several), INFO, CpuPlatform())
    assert resolved.scheduler.long_prefill_token_threshold == 40


def test_few_batched_tokens_bound_the_default_number_of_requests():
    few = SchedulerConfig(max_num_batched_tokens=32)
    resolved = resolve(EngineConfig(scheduler=few), INFO, CpuPlatform()).scheduler
    assert (resolved.max_num_seqs, resolved.max_num_shared_tokens) == (32, 32)


def pooling(**changes):
    info = PoolingInfo(
        ("embed",), changes.pop("pooling_type", "LAST"), **{"causal": True} | changes
    )
    return dataclasses.replace(INFO, runner="pooling", pooling=info)


def resolved(info, caplog, cache=None, **scheduler):
    caplog.set_level("INFO")
    config = EngineConfig(cache=cache or CacheConfig(), scheduler=SchedulerConfig(**scheduler))
    return resolve(config, info, CpuPlatform())


def test_prefixes_are_reused_where_results_stay_the_same(caplog):
    assert resolved(INFO, caplog).cache.enable_prefix_caching is True
    off = CacheConfig(enable_prefix_caching=False)
    assert resolved(INFO, caplog, off).cache.enable_prefix_caching is False
    assert resolved(pooling(), caplog).cache.enable_prefix_caching is True
    caplog.clear()
    for info, reason in (
        (pooling(causal=False), "looks both ways"),
        (pooling(pooling_type="MEAN"), "pooling type MEAN needs"),
    ):
        assert resolved(info, caplog).cache.enable_prefix_caching is False
        assert reason in caplog.text
        assert not [r for r in caplog.records if r.levelname == "WARNING"]
        wanted = resolved(info, caplog, CacheConfig(enable_prefix_caching=True))
        assert wanted.cache.enable_prefix_caching is False
        assert "enable_prefix_caching = True has no effect" in caplog.text
        caplog.clear()


def test_prompts_of_bidirectional_models_are_whole(caplog):
    info = pooling(causal=False, pooling_type="MEAN")
    small = resolved(info, caplog, max_num_batched_tokens=600).scheduler
    assert (small.enable_chunked_prefill, small.max_num_batched_tokens) == (False, 1000)
    assert "max_num_batched_tokens: 600 -> max_model_len = 1000" in caplog.text
    assert (
        resolved(info, caplog, max_num_batched_tokens=4000).scheduler.max_num_batched_tokens == 4000
    )
    assert resolved(info, caplog).scheduler.max_num_batched_tokens == 2048
    assert resolved(pooling(), caplog).scheduler.enable_chunked_prefill


def test_windows_of_what_is_no_mean_are_a_warning(caplog):
    resolved(pooling(pooling_type="MEAN", enable_chunked_processing=True), caplog)
    assert "suits only type MEAN" not in caplog.text
    resolved(pooling(pooling_type="CLS", enable_chunked_processing=True), caplog)
    assert "pooling type CLS: the vector of a long text becomes a mean" in caplog.text


def test_steps_of_pooling_models_are_not_kept_small(caplog):
    assert resolved(INFO, caplog).scheduler.max_num_shared_tokens == 512
    assert resolved(pooling(), caplog).scheduler.max_num_shared_tokens == 2048


def test_encoder_decoders_share_no_prefixes_and_compute_prompts_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    info = dataclasses.replace(INFO, is_encoder_decoder=True)
    with caplog.at_level("INFO"):
        made = resolve(EngineConfig(), info, CpuPlatform())
    assert made.cache.enable_prefix_caching is False
    assert made.scheduler.enable_chunked_prefill is False
    assert "prefix caching is off for LlamaForCausalLM: its states depend on the encoder" in (
        caplog.text
    )
    assert "chunked prefill is off" in caplog.text
    scales = CacheConfig(kv_cache_dtype="fp8", calculate_kv_scales=True)
    with pytest.raises(ConfigError, match="must be False for encoder-decoder models"):
        resolve(EngineConfig(cache=scales), info, CpuPlatform())
