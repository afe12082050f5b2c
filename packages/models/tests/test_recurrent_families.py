"""Families with recurrent layers against transformers, on tiny configs in which each feature matters."""

from __future__ import annotations

from typing import Any

from model_families_conformance import FamilyConformance

from headrace_testing.model.decoders import Checkpoint

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

    def test_nothing_ends_the_context(self, checkpoint: Checkpoint) -> None:
        assert self.resolve(checkpoint.path).max_model_len == 2048
        assert self.resolve(checkpoint.path, max_model_len=1_000_000).max_model_len == 1_000_000


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


EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}


class TestJamba(FamilyConformance):
    """Layers with and without attention, with and without experts."""

    def hf_class(self) -> Any:
        from transformers import JambaForCausalLM

        return JambaForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import JambaConfig

        own = {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2,
               "expert_layer_offset": 1, "mamba_d_state": 6, "mamba_d_conv": 3, "mamba_dt_rank": 5,
               "mamba_proj_bias": True, "num_hidden_layers": 4}  # fmt: skip
        return JambaConfig(**{**TINY, **ATTENTION, **EXPERTS, **own, **overrides})


class TestFalconH1(FamilyConformance):
    """Every multiplier is off its default, and no number of channels is another."""

    def hf_class(self) -> Any:
        from transformers import FalconH1ForCausalLM

        return FalconH1ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import FalconH1Config

        own = {"mamba_d_ssm": 60, "mamba_n_heads": 6, "mamba_d_head": 10, "projectors_bias": True,
               "lm_head_multiplier": 0.8, "embedding_multiplier": 1.7, "key_multiplier": 0.7,
               "mlp_multipliers": [0.9, 1.2], "attention_out_multiplier": 1.3,
               "attention_in_multiplier": 0.9, "ssm_multipliers": [0.7, 1.2, 0.8, 1.3, 1.1],
               "ssm_in_multiplier": 1.4, "ssm_out_multiplier": 0.6, "attention_bias": True,
               "mlp_bias": True, "num_hidden_layers": 2}  # fmt: skip
        return FalconH1Config(**{**TINY, **ATTENTION, **MAMBA2, **own, **overrides})


class TestFalconH1WithNorm(TestFalconH1):
    """The gated norm, gate first."""

    def hf_config(self, **overrides: Any) -> Any:
        own = {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_proj_bias": True}
        return super().hf_config(**{**own, **overrides})


class TestGraniteMoeHybrid(FamilyConformance):
    """The second layer attends, without positions; experts beside the shared MLP."""

    def hf_class(self) -> Any:
        from transformers import GraniteMoeHybridForCausalLM

        return GraniteMoeHybridForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import GraniteMoeHybridConfig

        own = {"layer_types": ["linear_attention", "full_attention", "linear_attention"],
               "embedding_multiplier": 1.5, "logits_scaling": 0.8, "residual_multiplier": 0.7,
               "attention_multiplier": 0.4, "num_local_experts": 4, "num_experts_per_tok": 2,
               "shared_intermediate_size": 36, "intermediate_size": 20}  # fmt: skip
        return GraniteMoeHybridConfig(**{**TINY, **ATTENTION, **MAMBA2, **own, **overrides})


class TestGraniteHybridDense(TestGraniteMoeHybrid):
    """Without experts, with rotary positions."""

    def hf_config(self, **overrides: Any) -> Any:
        own = {"num_local_experts": 0, "position_embedding_type": "rope"}
        return super().hf_config(**{**own, **overrides})


class TestNemotronH(FamilyConformance):
    """Blocks of all three kinds. transformers ties nothing."""

    flips_ties = False

    def hf_class(self) -> Any:
        from transformers import NemotronHForCausalLM

        return NemotronHForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import NemotronHConfig

        own = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
               "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 10,
               "conv_kernel": 3, "chunk_size": 8, "head_dim": 14, "use_bias": True,
               "mlp_bias": True}  # fmt: skip
        kept = {k: v for k, v in {**TINY, **ATTENTION}.items() if k != "num_hidden_layers"}
        return NemotronHConfig(**{**kept, **own, **overrides})


class TestNemotronHMixture(TestNemotronH):
    """Experts that work on a projection of the stream, chosen within groups."""

    def hf_config(self, **overrides: Any) -> Any:
        own = {
            "layers_block_type": ["linear_attention", "moe", "full_attention"],
            "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
            "moe_latent_size": 20, "moe_intermediate_size": 12, "routed_scaling_factor": 1.7,
            "moe_shared_expert_intermediate_size": 28,
        }  # fmt: skip
        return super().hf_config(**{**own, **overrides})


class TestLfm2(FamilyConformance):
    """The middle layer attends; the MLPs' size is rounded."""

    def hf_class(self) -> Any:
        from transformers import Lfm2ForCausalLM

        return Lfm2ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Lfm2Config

        own = {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True,
               "conv_L_cache": 4, "block_multiple_of": 12, "block_ffn_dim_multiplier": 1.3}  # fmt: skip
        return Lfm2Config(**{**TINY, **ATTENTION, **own, **overrides})


class TestLfm2Moe(FamilyConformance):
    """Dense first layer, then experts chosen by corrected scores."""

    def hf_class(self) -> Any:
        from transformers import Lfm2MoeForCausalLM

        return Lfm2MoeForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Lfm2MoeConfig

        own = {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1,
               "moe_intermediate_size": 20, "routed_scaling_factor": 1.3}  # fmt: skip
        return Lfm2MoeConfig(**{**TINY, **ATTENTION, **EXPERTS, **own, **overrides})


class TestMiniMax(FamilyConformance):
    """Both kinds of attention, every multiplier off its default."""

    def hf_class(self) -> Any:
        from transformers import MiniMaxForCausalLM

        return MiniMaxForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import MiniMaxConfig

        own = {"layer_types": ["linear_attention", "full_attention", "linear_attention"],
               "head_dim": 10, "block_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
               "full_attn_alpha_factor": 0.8, "full_attn_beta_factor": 1.2,
               "linear_attn_alpha_factor": 0.7, "linear_attn_beta_factor": 1.3,
               "mlp_alpha_factor": 0.9, "mlp_beta_factor": 1.4}  # fmt: skip
        return MiniMaxConfig(**{**TINY, **ATTENTION, **own, **overrides})


DELTA: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 18,
    "linear_value_head_dim": 14,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
MIXTURE: dict[str, Any] = {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 28}


class TestQwen3Next(FamilyConformance):
    """The last layer has a dense MLP; three value heads share a key head."""

    def hf_class(self) -> Any:
        from transformers import Qwen3NextForCausalLM

        return Qwen3NextForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Qwen3NextConfig

        own = {"mlp_only_layers": [1], "attention_bias": True}
        return Qwen3NextConfig(
            **{**TINY, **ATTENTION, **EXPERTS, **DELTA, **MIXTURE, **own, **overrides}
        )


class TestQwen3_5(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import Qwen3_5ForCausalLM

        return Qwen3_5ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers.models.qwen3_5 import Qwen3_5TextConfig

        return Qwen3_5TextConfig(**{**TINY, **ATTENTION, **DELTA, **overrides})


class TestQwen3_5Moe(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import Qwen3_5MoeForCausalLM

        return Qwen3_5MoeForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

        return Qwen3_5MoeTextConfig(
            **{**TINY, **ATTENTION, **EXPERTS, **DELTA, **MIXTURE, **overrides}
        )


class TestOlmoHybrid(FamilyConformance):
    """Rotary, negative eigenvalues. Value heads are as wide as key heads: else transformers saves the
    convolution in other pieces than it was made of."""

    def hf_class(self) -> Any:
        from transformers import OlmoHybridForCausalLM

        return OlmoHybridForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import OlmoHybridConfig

        kept = {k: v for k, v in DELTA.items() if k != "head_dim"}
        own = {
            "linear_num_value_heads": 2,
            "linear_value_head_dim": 18,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        }
        return OlmoHybridConfig(**{**TINY, **ATTENTION, **kept, **own, **overrides})
