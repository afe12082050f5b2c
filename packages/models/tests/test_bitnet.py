"""BitNet against transformers, with weights as they are; ternary ones are the quantization's affair."""

from __future__ import annotations

from typing import Any

import pytest
from model_families_conformance import FamilyConformance

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.decoders import Checkpoint


class TestBitNet(FamilyConformance):
    """Norms inside both halves, whose statistics are of all ranks."""

    def hf_class(self) -> Any:
        from transformers import BitNetForCausalLM

        return BitNetForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import BitNetConfig

        own = {
            "vocab_size": 131, "hidden_size": 72, "num_hidden_layers": 3, "intermediate_size": 100,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
            "rms_norm_eps": 1e-4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        return BitNetConfig(**{**own, **overrides})

    def test_pooling_in_both_directions_is_refused(self, checkpoint: Checkpoint) -> None:
        """By every family whose attention is of a kind of its own."""
        asked: dict[str, Any] = {"runner": "pooling", "hf_overrides": {"is_causal": False}}
        with pytest.raises(UnsupportedModel, match=r"layers\.0\.self_attn is causal"):
            self.open(checkpoint.path, **asked)
