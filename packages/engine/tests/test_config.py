from __future__ import annotations

import dataclasses
import re

import msgspec
import pytest

from headrace_core.config import ModelConfig
from headrace_core.errors import ConfigError
from headrace_core.kv import CACHE_DTYPES, ROW_SCALED_BITS
from headrace_engine.config import (
    DEFAULT_CAPTURE_SIZES,
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    GraphConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    StructuredOutputsConfig,
)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: CacheConfig(block_size=24), "cache.block_size"),
        (lambda: CacheConfig(gpu_memory_utilization=0), "cache.gpu_memory_utilization"),
        (lambda: CacheConfig(gpu_memory_utilization=1.1), "cache.gpu_memory_utilization"),
        (lambda: CacheConfig(kv_cache_dtype="int3"), "cache.kv_cache_dtype"),
        (lambda: CacheConfig(kv_cache_dtype="int8"), "cache.kv_cache_dtype"),
        (lambda: CacheConfig(calculate_kv_scales=True), "cache.calculate_kv_scales"),
        (lambda: CacheConfig(kv_cache_dtype="int4_per_token_head", calculate_kv_scales=True),
         "cache.calculate_kv_scales"),
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
        (lambda: SchedulerConfig(target_itl=0), "scheduler.target_itl"),
        (lambda: SchedulerConfig(target_itl=-0.1), "scheduler.target_itl"),
        (lambda: SchedulerConfig(target_itl=float("nan")), "scheduler.target_itl"),
        (lambda: SchedulerConfig(target_itl=float("inf")), "scheduler.target_itl"),
        (lambda: SchedulerConfig(target_itl="fast"), "scheduler.target_itl"),
        (lambda: SchedulerConfig(target_itl=0.1, enable_chunked_prefill=False), "scheduler.target_itl"),
        (lambda: SchedulerConfig(target_ttft=0), "scheduler.target_ttft"),
        (lambda: SchedulerConfig(target_ttft=float("nan")), "scheduler.target_ttft"),
        (lambda: SchedulerConfig(target_ttft=1.0, policy="priority"), "scheduler.target_ttft"),
        (lambda: SchedulerConfig(target_ttft=1.0, policy="fair"), "scheduler.target_ttft"),
        (lambda: ParallelConfig(tensor_parallel_size=0), "parallel.tensor_parallel_size"),
        (lambda: ParallelConfig(pipeline_parallel_size=0), "parallel.pipeline_parallel_size"),
        (lambda: ParallelConfig(pipeline_parallel_size=33, tensor_parallel_size=2),
         "parallel.pipeline_parallel_size"),
        (lambda: ParallelConfig(prefill_context_parallel_size=0), "parallel.prefill_context_parallel_size"),
        (lambda: ParallelConfig(prefill_context_parallel_size=33, tensor_parallel_size=2),
         "parallel.prefill_context_parallel_size"),
        (lambda: ParallelConfig(prefill_context_parallel_size=2, pipeline_parallel_size=2),
         "parallel.prefill_context_parallel_size"),
        (lambda: ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="uni"),
         "parallel.distributed_executor_backend"),
        (lambda: DeviceConfig(num_threads=-1), "device.num_threads"),
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
    for config in (AttentionConfig, CacheConfig, DeviceConfig, GraphConfig, ObservabilityConfig,
                   ParallelConfig, SchedulerConfig, StructuredOutputsConfig):  # fmt: skip
        for field in dataclasses.fields(config):
            assert len(field.metadata["help"]) > 10, (config, field.name)


def test_survives_the_process_border():
    config = EngineConfig(model=ModelConfig(hf_overrides={"a": {"b": 1}}, served_model_name=("x",)))
    encoded = msgspec.json.encode(config)
    assert msgspec.json.decode(encoded, type=EngineConfig) == config


def test_the_help_of_capture_sizes_names_the_default_ones() -> None:
    fields = {field.name: field for field in dataclasses.fields(GraphConfig)}
    text = str(fields["cudagraph_capture_sizes"].metadata["help"])
    named = [int(number) for number in re.findall(r"\d+", text.partition("Default:")[2])]
    assert tuple(named) == DEFAULT_CAPTURE_SIZES


@pytest.mark.parametrize(
    "settings",
    [
        {"backend": "none"},
        {"disable_any_whitespace": True},
        {"disable_any_whitespace": True, "backend": "outlines"},
        {"disable_additional_properties": True},
        {"disable_additional_properties": True, "backend": "xgrammar"},
        {"compile_seconds": 0.0},
        {"max_depth": 0},
    ],
)
def test_settings_that_contradict_are_errors_at_start(settings):
    with pytest.raises(ConfigError) as caught:
        StructuredOutputsConfig(**settings)
    assert caught.value.field.startswith("structured_outputs.")


def test_settings_that_fit():
    assert StructuredOutputsConfig(backend="llguidance").backend == "guidance"
    StructuredOutputsConfig(backend="xgrammar", disable_any_whitespace=True)
    StructuredOutputsConfig(
        backend="guidance", disable_any_whitespace=True, disable_additional_properties=True
    )


def test_int8_without_measured_scales_is_refused():
    with pytest.raises(ConfigError) as caught:
        CacheConfig(kv_cache_dtype="int8")
    for part in ("cache.kv_cache_dtype = 'int8'", "cache.calculate_kv_scales = True",
                 "--calculate-kv-scales"):  # fmt: skip
        assert part in str(caught.value)


def test_measuring_for_a_cache_without_scales_is_refused():
    with pytest.raises(ConfigError) as caught:
        CacheConfig(calculate_kv_scales=True)
    assert "cache.calculate_kv_scales = True" in str(caught.value)
    assert "cache.kv_cache_dtype = 'auto'" in str(caught.value)


@pytest.mark.parametrize("kind", sorted(CACHE_DTYPES.keys() - ROW_SCALED_BITS.keys() - {"auto"}))
def test_every_one_byte_cache_may_be_measured(kind):
    assert CacheConfig(kv_cache_dtype=kind, calculate_kv_scales=True).calculate_kv_scales
