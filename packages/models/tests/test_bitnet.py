"""BitNet against transformers, with weights as they are; ternary ones are the quantization's affair."""

from __future__ import annotations

from typing import Any

import pytest
from model_families_conformance import FamilyConformance

pytestmark = pytest.mark.spec("MODEL-TEXTGEN-LLAMA")


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
