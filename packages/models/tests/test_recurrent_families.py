"""Families with recurrent layers against transformers, on tiny configs in which each feature matters."""

from __future__ import annotations

from typing import Any

import pytest
from model_families_conformance import FamilyConformance

pytestmark = pytest.mark.spec("MODEL-TEXTGEN-SSM")

TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ATTENTION: dict[str, Any] = {
    "intermediate_size": 68,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 8,
}


class TestMamba(FamilyConformance):
    """All biases, a rank of its own, 36 channels."""

    def hf_class(self) -> Any:
        from transformers import MambaForCausalLM

        return MambaForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import MambaConfig

        own = {"state_size": 7, "time_step_rank": 5, "conv_kernel": 3, "use_bias": True,
               "hidden_size": 36, "expand": 1}  # fmt: skip
        return MambaConfig(**{**TINY, **own, **overrides})


class TestFalconMamba(TestMamba):
    """The norms have an eps that matters."""

    def hf_class(self) -> Any:
        from transformers import FalconMambaForCausalLM

        return FalconMambaForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import FalconMambaConfig

        own = {"state_size": 7, "conv_kernel": 4, "use_conv_bias": False, "mixer_rms_eps": 0.1}
        return FalconMambaConfig(**{**TINY, **own, **overrides})


class TestMamba2(FamilyConformance):
    """Steps are limited; two groups of heads."""

    def hf_class(self) -> Any:
        from transformers import Mamba2ForCausalLM

        return Mamba2ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Mamba2Config

        own = {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 10, "conv_kernel": 3,
               "chunk_size": 8, "use_bias": True, "time_step_limit": (0.3, 1.1)}  # fmt: skip
        return Mamba2Config(**{**TINY, **own, **overrides})


class TestBamba(FamilyConformance):
    """The middle layer attends."""

    def hf_class(self) -> Any:
        from transformers import BambaForCausalLM

        return BambaForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import BambaConfig

        own = {"attn_layer_indices": [1], "mamba_proj_bias": True, "attention_bias": True,
               "mlp_bias": True}  # fmt: skip
        return BambaConfig(**{**TINY, **ATTENTION, **MAMBA2, **own, **overrides})
