"""LFM3 against transformers."""

from __future__ import annotations

from typing import Any

from model_families_conformance import FamilyConformance


class TestLfm3(FamilyConformance):
    """A convolution, a window shorter than the prompt and a layer that sees everything, biases."""

    def hf_class(self) -> Any:
        from transformers import Lfm3ForCausalLM

        return Lfm3ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Lfm3Config

        own = {
            "vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 68,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "layer_types": ["conv", "sliding_attention", "full_attention"], "sliding_window": 9,
            "conv_bias": True, "conv_L_cache": 5, "max_position_embeddings": 128,
            "norm_eps": 1e-4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        return Lfm3Config(**{**own, **overrides})
