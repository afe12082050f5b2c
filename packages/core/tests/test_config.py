from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import msgspec
import pytest

from headrace_core.config import (
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    GraphConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
)  # fmt: skip
from headrace_core.errors import ConfigError
from headrace_core.model import ModelInfo
from headrace_core.platform import CpuPlatform
from headrace_core.pooling import PoolingInfo
from headrace_core.resolution import resolve

INFO = ModelInfo(
    name="m", path=Path("/m"), architecture="LlamaForCausalLM", config={}, generation_config={},
    dtype="bfloat16", max_model_len=1000, vocab_size=10, eos_token_ids=(1,),
)  # fmt: skip


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: CacheConfig(block_size=24), "cache.block_size"),
        (lambda: CacheConfig(gpu_memory_utilization=0), "cache.gpu_memory_utilization"),
        (lambda: CacheConfig(gpu_memory_utilization=1.1), "cache.gpu_memory_utilization"),
        (lambda: CacheConfig(kv_cache_dtype="int3"), "cache.kv_cache_dtype"),
        (lambda: CacheConfig(kv_cache_dtype="int8"), "cache.kv_cache_dtype"),
        (lambda: CacheConfig(calculate_kv_scales=True), "cache.calculate_kv_scales"),
        (lambda: CacheConfig(kv_cache_ahead_bytes=-2), "cache.kv_cache_ahead_bytes"),
        (lambda: CacheConfig(num_gpu_blocks_override=0), "cache.num_gpu_blocks_override"),
        (lambda: SchedulerConfig(max_num_seqs=0), "scheduler.max_num_seqs"),
        (lambda: SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=8),
         "scheduler.max_num_batched_tokens"),
        (lambda: SchedulerConfig(max_num_shared_tokens=9, max_num_batched_tokens=8),
         "scheduler.max_num_shared_tokens"),
        (lambda: SchedulerConfig(max_long_partial_prefills=2), "scheduler.max_long_partial_prefills"),
        (lambda: SchedulerConfig(max_num_partial_prefills=2, enable_chunked_prefill=False),
         "scheduler.max_num_partial_prefills"),
        (lambda: SchedulerConfig(policy="lifo"), "scheduler.policy"),
        (lambda: SchedulerConfig(stream_interval=0), "scheduler.stream_interval"),
        (lambda: ModelConfig(dtype="int8"), "model.dtype"),
        (lambda: ModelConfig(max_model_len=0), "model.max_model_len"),
        (lambda: ModelConfig(max_logprobs=-2), "model.max_logprobs"),
        (lambda: ModelConfig(limit_mm_per_prompt={"audio": -1}), "model.limit_mm_per_prompt.audio"),
        (lambda: ModelConfig(limit_mm_per_prompt={"audio": {"count": "2"}}),
         "model.limit_mm_per_prompt.audio"),
        (lambda: ModelConfig(limit_mm_per_prompt={"audio": {"length": 2}}),
         "model.limit_mm_per_prompt.audio.length"),
        (lambda: ModelConfig(limit_mm_per_prompt={"smell": 2}), "model.limit_mm_per_prompt.smell"),
        (lambda: ParallelConfig(tensor_parallel_size=2), "parallel.tensor_parallel_size"),
        (lambda: DeviceConfig(num_threads=-1), "device.num_threads"),
        (lambda: LoadConfig(safetensors_load_strategy="fast"), "load.safetensors_load_strategy"),
        (lambda: GraphConfig(cudagraph_capture_sizes=(8, 0)), "graph.cudagraph_capture_sizes"),
        (lambda: GraphConfig(max_cudagraph_capture_size=0), "graph.max_cudagraph_capture_size"),
        (lambda: GraphConfig(cudagraph_capture_sizes=(8, 4), max_cudagraph_capture_size=4),
         "graph.max_cudagraph_capture_size"),
        (lambda: ObservabilityConfig(log_stats_interval=0), "observability.log_stats_interval"),
        (lambda: ObservabilityConfig(collect_detailed_traces=("model,gpu",)),
         "observability.collect_detailed_traces"),
        (lambda: EngineConfig(profiler_config={"delay_iterations": "3"}),
         "profiler_config.delay_iterations"),
        (lambda: EngineConfig(profiler_config={"profiler": "torch", "torch_profiler_dir": 5}),
         "profiler_config.torch_profiler_dir"),
        (lambda: EngineConfig(profiler_config={"torch_profiler_use_gzip": "no"}),
         "profiler_config.torch_profiler_use_gzip"),
        (lambda: EngineConfig(profiler_config={"profiler": []}), "profiler_config.profiler"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_field(make, field):
    with pytest.raises(ConfigError, match=field) as caught:
        make()
    assert caught.value.field == field


@pytest.mark.spec("CFG-OBS")
@pytest.mark.parametrize(
    ("given", "words", "forward", "execute"),
    [
        ((), (), False, False),
        ("model, worker", ("model", "worker"), True, True),
        (("worker", "model"), ("worker", "model"), True, True),
        (["model"], ("model",), True, False),
        (("worker",), ("worker",), False, True),
        ("all", ("all",), True, True),
    ],
)
def test_what_detailed_traces_collect(given, words, forward, execute):
    config = ObservabilityConfig(collect_detailed_traces=given)
    assert config.collect_detailed_traces == words
    assert (config.collect_forward_time, config.collect_execute_time) == (forward, execute)


def test_every_option_has_help():
    for config in (AttentionConfig, CacheConfig, DeviceConfig, LoadConfig, ModelConfig,
                   ObservabilityConfig, ParallelConfig, SchedulerConfig):  # fmt: skip
        for field in dataclasses.fields(config):
            assert len(field.metadata["help"]) > 10, (config, field.name)


def test_dtype_aliases():
    assert ModelConfig(dtype="half").dtype == "float16"
    assert ModelConfig(dtype="bf16").dtype == "bfloat16"


@pytest.mark.spec("CFG-SCHED")
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


@pytest.mark.spec("SCHED-CONFIG")
def test_without_chunked_prefill_a_step_must_hold_the_longest_prompt():
    off = SchedulerConfig(enable_chunked_prefill=False)
    assert resolve(
        EngineConfig(scheduler=off), INFO, CpuPlatform()
    ).scheduler.max_num_batched_tokens
    small = dataclasses.replace(off, max_num_batched_tokens=999, max_num_seqs=4)
    with pytest.raises(ConfigError, match="max_model_len = 1000"):
        resolve(EngineConfig(scheduler=small), INFO, CpuPlatform())


@pytest.mark.spec("SCHED-CONFIG")
def test_long_prefill_threshold_defaults_to_four_percent():
    several = SchedulerConfig(max_num_partial_prefills=2)
    resolved = resolve(EngineConfig(scheduler=several), INFO, CpuPlatform())
    assert resolved.scheduler.long_prefill_token_threshold == 40


def test_few_batched_tokens_bound_the_default_number_of_requests():
    few = SchedulerConfig(max_num_batched_tokens=32)
    resolved = resolve(EngineConfig(scheduler=few), INFO, CpuPlatform()).scheduler
    assert (resolved.max_num_seqs, resolved.max_num_shared_tokens) == (32, 32)


def test_survives_the_process_border():
    config = EngineConfig(model=ModelConfig(hf_overrides={"a": {"b": 1}}, served_model_name=("x",)))
    encoded = msgspec.json.encode(config)
    assert msgspec.json.decode(encoded, type=EngineConfig) == config


def test_cpu_memory_is_positive():
    assert CpuPlatform().available_memory() > 1 << 20


def pooling(**changes):
    info = PoolingInfo(
        ("embed",), changes.pop("pooling_type", "LAST"), **{"causal": True} | changes
    )
    return dataclasses.replace(INFO, runner="pooling", pooling=info)


def resolved(info, caplog, cache=None, **scheduler):
    caplog.set_level("INFO")
    config = EngineConfig(cache=cache or CacheConfig(), scheduler=SchedulerConfig(**scheduler))
    return resolve(config, info, CpuPlatform())


@pytest.mark.spec("POOL-PREFIXCACHE")
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


@pytest.mark.spec("POOL-VARLEN")
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


@pytest.mark.spec("POOL-LONGTEXT")
def test_windows_of_what_is_no_mean_are_a_warning(caplog):
    resolved(pooling(pooling_type="MEAN", enable_chunked_processing=True), caplog)
    assert "meant to be averaged" not in caplog.text
    resolved(pooling(pooling_type="CLS", enable_chunked_processing=True), caplog)
    assert "pooling type CLS: long texts become a mean" in caplog.text


def test_steps_of_pooling_models_are_not_kept_small(caplog):
    assert resolved(INFO, caplog).scheduler.max_num_shared_tokens == 512
    assert resolved(pooling(), caplog).scheduler.max_num_shared_tokens == 2048


@pytest.mark.spec("FEAT-MATRIX")
def test_encoder_decoders_share_no_prefixes_and_compute_prompts_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    info = dataclasses.replace(INFO, is_encoder_decoder=True)
    with caplog.at_level("INFO"):
        made = resolve(EngineConfig(), info, CpuPlatform())
    assert made.cache.enable_prefix_caching is False
    assert made.scheduler.enable_chunked_prefill is False
    assert "prefix caching is off for LlamaForCausalLM: its states depend on what the encoder" in (
        caplog.text
    )
    assert "chunked prefill is off" in caplog.text
    scales = CacheConfig(kv_cache_dtype="fp8", calculate_kv_scales=True)
    with pytest.raises(ConfigError, match="must be False for encoder-decoder models"):
        resolve(EngineConfig(cache=scales), info, CpuPlatform())


def test_the_help_of_capture_sizes_names_the_default_ones() -> None:
    from headrace_core.graph import DEFAULT_CAPTURE_SIZES

    fields = {field.name: field for field in dataclasses.fields(GraphConfig)}
    text = str(fields["cudagraph_capture_sizes"].metadata["help"])
    named = [int(number) for number in re.findall(r"\d+", text.partition("Default:")[2])]
    assert tuple(named) == DEFAULT_CAPTURE_SIZES
