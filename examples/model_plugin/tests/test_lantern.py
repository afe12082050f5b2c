"""The package's family against a class of transformers that computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.model import BuildContext, CausalLM, ModelInfo
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_testing.model.decoders import ModelConformance


class LanternForCausalLM(transformers.GraniteForCausalLM):
    """Granite is Llama with several factors, of which all but one are 1 here. The name is what
    ``save_pretrained`` writes into config.json."""


class TestLantern(ModelConformance):
    """Everything that headrace tests of its own families."""

    def hf_class(self) -> Any:
        return LanternForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        settings = {
            "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
            "embedding_multiplier": 3.5, "attention_multiplier": 12**-0.5,
        }  # fmt: skip
        return transformers.GraniteConfig(**{**settings, **overrides})

    def resolve(self, path: Path, **settings: Any) -> ModelInfo:
        return resolve(ModelConfig(model=str(path), **settings), LoadConfig(), CpuPlatform())

    def load(self, info: ModelInfo, context: BuildContext, **settings: Any) -> CausalLM:
        return load_model(info, context, load=LoadConfig(**settings))
