from __future__ import annotations

from typing import Any

import pytest

from headrace_core.config import ModelConfig
from headrace_core.errors import ConfigError
from headrace_core.pooling import PoolingTraits
from headrace_models.pooling.traits import pooling_traits
from headrace_models.runner import Run, choose_run


def choose(architecture: str, *, sentence_transformer: bool = False, **settings: Any) -> Run:
    return choose_run(
        ModelConfig(model="m", **settings),
        architecture,
        pooling_traits(architecture),
        sentence_transformer=sentence_transformer,
    )


@pytest.mark.parametrize(
    ("architecture", "run"),
    [
        ("LlamaForCausalLM", Run("generate", "none")),
        ("WhisperForConditionalGeneration", Run("generate", "none")),
        ("SomeChatModel", Run("generate", "none")),
        ("NVLM_D_Model", Run("generate", "none")),
        ("GPT2LMHeadModel", Run("generate", "none")),
        ("SomethingElse", Run("generate", "none")),
        ("LlamaModel", Run("pooling", "embed")),
        ("T5ForTextEncoding", Run("pooling", "embed")),
        ("SomeEmbeddingModel", Run("pooling", "embed")),
        ("SomeForRewardModeling", Run("pooling", "embed")),
        ("InternLM2RewardModel", Run("pooling", "embed")),
        ("Qwen2ForSequenceClassification", Run("pooling", "classify")),
        ("LlamaForTokenClassification", Run("pooling", "classify")),
        ("SomeForImageClassification", Run("pooling", "classify")),
        ("SomeClassificationModel", Run("pooling", "classify")),
        ("BertModel", Run("pooling", "none")),
        ("RobertaForMaskedLM", Run("pooling", "none")),
        ("BertForTokenClassification", Run("pooling", "none")),
    ],
)
def test_auto_follows_class_and_name(architecture: str, run: Run) -> None:
    assert choose(architecture) == run


def test_sentence_transformers_files_make_a_generator_pool() -> None:
    assert choose("LlamaForCausalLM", sentence_transformer=True) == Run("pooling", "embed")


def test_the_user_decides() -> None:
    assert choose("LlamaForCausalLM", runner="pooling") == Run("pooling", "embed")
    assert choose("LlamaForCausalLM", runner="pooling", convert="classify").convert == "classify"
    assert choose("LlamaModel", runner="generate") == Run("generate", "none")
    stays = choose("LlamaForCausalLM", runner="generate", sentence_transformer=True)
    assert stays == Run("generate", "none")


def test_old_name_of_embed() -> None:
    assert choose("LlamaForCausalLM", runner="pooling", convert="reward").convert == "embed"


def test_an_encoder_generates_nothing() -> None:
    with pytest.raises(ConfigError, match=r"model.runner = 'generate': BertModel generates no"):
        choose("BertModel", runner="generate")


@pytest.mark.parametrize(
    ("architecture", "convert"),
    [("BertModel", "classify"), ("BertForSequenceClassification", "embed")],
)
def test_a_class_that_pools_is_not_converted(architecture: str, convert: str) -> None:
    with pytest.raises(ConfigError, match=r"model.convert.*hf_overrides"):
        choose(architecture, convert=convert)
    assert choose(architecture, convert="none") == Run("pooling", "none")


def test_conversion_needs_the_pooling_runner() -> None:
    with pytest.raises(ConfigError, match="--runner pooling"):
        choose("LlamaForCausalLM", convert="embed")


def test_only_classes_that_pool_have_traits() -> None:
    assert pooling_traits("LlamaForCausalLM") is None
    assert pooling_traits("NobodyModel") is None
    assert isinstance(pooling_traits("MPNetModel"), PoolingTraits)
