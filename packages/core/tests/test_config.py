from __future__ import annotations

import dataclasses

import pytest

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import ConfigError
from headrace_core.platform import CpuPlatform


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ModelConfig(dtype="int8"), "model.dtype"),
        (lambda: ModelConfig(max_model_len=0), "model.max_model_len"),
        (lambda: ModelConfig(max_logprobs=-2), "model.max_logprobs"),
        (lambda: ModelConfig(limit_mm_per_prompt={"audio": -1}), "model.limit_mm_per_prompt.audio"),
        (lambda: ModelConfig(limit_mm_per_prompt={"audio": {"count": "2"}}),
         "model.limit_mm_per_prompt.audio"),
        (lambda: ModelConfig(limit_mm_per_prompt={"audio": {"rate": 2}}),
         "model.limit_mm_per_prompt.audio.rate"),
        (lambda: ModelConfig(limit_mm_per_prompt={"audio": {"length": 0}}),
         "model.limit_mm_per_prompt.audio.length"),
        (lambda: ModelConfig(limit_mm_per_prompt={"smell": 2}), "model.limit_mm_per_prompt.smell"),
        (lambda: LoadConfig(safetensors_load_strategy="fast"), "load.safetensors_load_strategy"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_field(make, field):
    with pytest.raises(ConfigError, match=field) as caught:
        make()
    assert caught.value.field == field


@pytest.mark.parametrize("config", [LoadConfig, ModelConfig])
def test_every_option_has_help(config):
    for field in dataclasses.fields(config):
        assert len(field.metadata["help"]) > 10, field.name


def test_dtype_aliases():
    assert ModelConfig(dtype="half").dtype == "float16"
    assert ModelConfig(dtype="bf16").dtype == "bfloat16"


def test_cpu_memory_is_positive():
    assert CpuPlatform().available_memory() > 1 << 20
