"""Latent attention against transformers: the layer in both forms, and every family that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_families_conformance import FamilyConformance

from headrace_models.layers.attention import mla
from headrace_testing.model.decoders import Checkpoint

TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "kv_lora_rank": 22,
    "q_lora_rank": 26,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 6,
    "v_head_dim": 18,
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 36,
    "routed_scaling_factor": 1.7,
    "n_group": 4,
    "topk_group": 2,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 20,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "beta_fast": 4,
    "beta_slow": 1,
}


class TestDeepseekV3(FamilyConformance):
    """The first layer dense, the choice corrected and within groups, YaRN's temperature."""

    flips_ties = False

    def hf_class(self) -> Any:
        from transformers import DeepseekV3ForCausalLM

        return DeepseekV3ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import DeepseekV3Config

        own = {"first_k_dense_replace": 1, "rope_parameters": YARN, "attention_bias": True}
        return DeepseekV3Config(**{**TINY, **EXPERTS, **own, **overrides})

    def test_an_adapter_where_prompts_are_expanded(
        self, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(mla, "EXPAND_FROM", 5)
        expanded, to_key = [], mla.HeadProjections.to_key
        monkeypatch.setattr(
            mla.HeadProjections, "to_key", lambda *a: expanded.append(a) or to_key(*a)
        )
        self.test_an_adapter_of_all_linear_modules(checkpoint, tmp_path)
        assert expanded


class TestDeepseekV3Direct(TestDeepseekV3):
    """Moonlight's kind: queries without a latent, no groups, plain rotation of halves."""

    def hf_config(self, **overrides: Any) -> Any:
        own = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False,
               "norm_topk_prob": False, "rope_parameters": {"rope_theta": 300.0}}  # fmt: skip
        return super().hf_config(**{**own, **overrides})


class TestDeepseekV2(FamilyConformance):
    flips_ties = False

    def hf_class(self) -> Any:
        from transformers import DeepseekV2ForCausalLM

        return DeepseekV2ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import DeepseekV2Config

        own = {"first_k_dense_replace": 1, "rope_parameters": YARN,
               "topk_method": "group_limited_greedy"}  # fmt: skip
        return DeepseekV2Config(**{**TINY, **EXPERTS, **own, **overrides})


class TestGlm4MoeLite(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import Glm4MoeLiteForCausalLM

        return Glm4MoeLiteForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Glm4MoeLiteConfig

        own = {"mlp_layer_types": ["sparse", "dense", "sparse"]}
        return Glm4MoeLiteConfig(**{**TINY, **EXPERTS, **own, **overrides})


class TestMiniCPM3(FamilyConformance):
    """Values as wide as heads of the hidden size would be, which the config does not say."""

    def hf_class(self) -> Any:
        from transformers import MiniCPM3ForCausalLM

        return MiniCPM3ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import MiniCPM3Config

        own = {
            "v_head_dim": None, "scale_emb": 3.0, "scale_depth": 1.1, "dim_model_base": 48,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 500.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0, 1.1, 1.4], "long_factor": [1.0, 2.1, 3.2],
            },
        }  # fmt: skip
        return MiniCPM3Config(**{**TINY, **own, **overrides})


class TestYoutu(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import YoutuForCausalLM

        return YoutuForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import YoutuConfig

        own = {"rope_parameters": {"rope_theta": 300.0}, "attention_bias": True}
        return YoutuConfig(**{**TINY, **own, **overrides})


class TestLongcatFlash(FamilyConformance):
    """Five experts that compute and three that give back what they get.

    transformers keeps gates and ups of the latter too, which no published checkpoint has.
    """

    flips_ties = False

    def hf_class(self) -> Any:
        from transformers import LongcatFlashForCausalLM

        return LongcatFlashForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import LongcatFlashConfig

        own = {"num_layers": 2, "head_dim": TINY["qk_rope_head_dim"], "ffn_hidden_size": 60,
               "expert_ffn_hidden_size": 36, "moe_topk": 3, "n_routed_experts": 5,
               "zero_expert_num": 3, "routed_scaling_factor": 2.1, "attention_bias": True,
               "rope_parameters": {"rope_theta": 300.0}}  # fmt: skip
        dropped = ("num_hidden_layers", "intermediate_size")
        tiny = {name: value for name, value in TINY.items() if name not in dropped}
        return LongcatFlashConfig(**{**tiny, **own, **overrides})


class TestLlama4(FamilyConformance):
    """Chunks shorter than the prompt, a full layer between, mixtures in the second and fourth layer."""

    def hf_class(self) -> Any:
        from transformers import Llama4ForCausalLM

        return Llama4ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Llama4TextConfig

        own = {
            "num_hidden_layers": 4, "head_dim": 22, "intermediate_size": 44,
            "intermediate_size_mlp": 60, "num_key_value_heads": 2, "num_local_experts": 5,
            "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "attention_chunk_size": 9,
            "no_rope_layer_interval": 3, "floor_scale": 5, "attn_scale": 0.4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
            "attention_bias": True,
        }  # fmt: skip
        tiny = {k: v for k, v in TINY.items() if "lora" not in k and "_dim" not in k}
        return Llama4TextConfig(**{**tiny, **own, **overrides})


class TestLlama4Dense(TestLlama4):
    """Maverick's kind: no norms of queries and keys."""

    def hf_config(self, **overrides: Any) -> Any:
        own = {"use_qk_norm": False, "attn_temperature_tuning": False, "num_experts_per_tok": 1}
        return super().hf_config(**{**own, **overrides})
