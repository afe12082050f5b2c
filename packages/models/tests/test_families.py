"""Every family against transformers, on tiny configs in which each of its features matters:
windows, original contexts and short rotary factors are below the suite's prompt length."""

from __future__ import annotations

from typing import Any

from model_families_conformance import FamilyConformance

TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}


class TestLlama(FamilyConformance):
    """Scaled rotary, all biases, heads wider than hidden_size / num_heads; two ranks share each
    key-value head."""

    tensor_parallel = 4

    def hf_class(self) -> Any:
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import LlamaConfig

        own = {"head_dim": 22, "rope_parameters": LLAMA3_ROPE, "attention_bias": True,
               "mlp_bias": True}  # fmt: skip
        return LlamaConfig(**{**TINY, **own, **overrides})


class TestMistral(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import MistralForCausalLM

        return MistralForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import MistralConfig

        return MistralConfig(**{**TINY, "head_dim": 18, "sliding_window": 9, **overrides})


class TestQwen2(FamilyConformance):
    """Windows on the last layer only, so that the cache has two groups."""

    def hf_class(self) -> Any:
        from transformers import Qwen2ForCausalLM

        return Qwen2ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Qwen2Config

        own = {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 2}
        return Qwen2Config(**{**TINY, **own, **overrides})


class TestQwen3(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import Qwen3ForCausalLM

        return Qwen3ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Qwen3Config

        own = {"head_dim": 24, "use_sliding_window": True, "sliding_window": 10,
               "max_window_layers": 1}  # fmt: skip
        return Qwen3Config(**{**TINY, **own, **overrides})


class TestGemma(FamilyConformance):
    """The config names the activation as old ones do."""

    def hf_class(self) -> Any:
        from transformers import GemmaForCausalLM

        return GemmaForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import GemmaConfig

        return GemmaConfig(**{**TINY, "head_dim": 20, "hidden_act": "gelu", **overrides})


class TestGemma2(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import Gemma2ForCausalLM

        return Gemma2ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Gemma2Config

        own = {"head_dim": 20, "sliding_window": 7, "query_pre_attn_scalar": 30,
               "attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0}  # fmt: skip
        return Gemma2Config(**{**TINY, **own, **overrides})


class TestGemma3(FamilyConformance):
    """Seven layers: six with windows and the local base, one full with its own scaling."""

    def hf_class(self) -> Any:
        from transformers import Gemma3ForCausalLM

        return Gemma3ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Gemma3TextConfig

        own = {
            "num_hidden_layers": 7, "head_dim": 20, "sliding_window": 7, "query_pre_attn_scalar": 30,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        }  # fmt: skip
        return Gemma3TextConfig(**{**TINY, **own, **overrides})


class TestPhi3(FamilyConformance):
    """LongRoPE within the original context (short factors); two thirds of each head turn."""

    def hf_class(self) -> Any:
        from transformers import Phi3ForCausalLM

        return Phi3ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Phi3Config

        own = {
            "sliding_window": 21,
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.67,
                "short_factor": [1.0, 1.1, 1.2, 1.5, 1.9, 2.5],
                "long_factor": [1.0, 2.1, 3.2, 4.5, 5.9, 7.5],
            },
        }  # fmt: skip
        return Phi3Config(**{**TINY, **own, **overrides})


class TestPhi3Long(TestPhi3):
    """Beyond the original context (long factors): every sequence of two tokens or more is, and
    a single one stands at position 0, where all factors agree."""

    def hf_config(self, **overrides: Any) -> Any:
        config = super().hf_config(**overrides)
        config.original_max_position_embeddings = 1
        config.rope_parameters["original_max_position_embeddings"] = 1
        config.rope_parameters["attention_factor"] = 1.2
        return config


class TestGPT2(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import GPT2LMHeadModel

        return GPT2LMHeadModel

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import GPT2Config

        own = {"vocab_size": 131, "n_embd": 72, "n_layer": 3, "n_head": 4, "n_positions": 96,
               "n_inner": 100, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
        return GPT2Config(**{**own, **overrides})


class TestMixtral(FamilyConformance):
    def hf_class(self) -> Any:
        from transformers import MixtralForCausalLM

        return MixtralForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import MixtralConfig

        own = {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 11}
        return MixtralConfig(**{**TINY, **own, **overrides})


class TestQwen3Moe(FamilyConformance):
    """First layer dense, then experts whose probabilities are not renormalised."""

    def hf_class(self) -> Any:
        from transformers import Qwen3MoeForCausalLM

        return Qwen3MoeForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Qwen3MoeConfig

        own = {"head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False,
               "moe_intermediate_size": 40, "mlp_only_layers": [0]}  # fmt: skip
        return Qwen3MoeConfig(**{**TINY, **own, **overrides})
