"""Tiny checkpoints of every supported family, made by transformers with random weights.

Windows, scaling ranges and caps are small enough to matter at the lengths that the tests use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 320

_COMMON = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip

Families = dict[str, tuple[str, dict[str, Any]]]
"""Class of transformers' config and its settings, by family."""

FAMILIES: Families = {
    "llama": ("LlamaConfig", {**_COMMON, "tie_word_embeddings": False}),
    "llama3": ("LlamaConfig", {**_COMMON, "rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**_COMMON, "head_dim": 16, "sliding_window": 24}),
    "qwen2": ("Qwen2Config", {**_COMMON}),
    "qwen3": ("Qwen3Config", {**_COMMON, "head_dim": 32}),
    "gemma2": ("Gemma2Config", {
        **_COMMON, "head_dim": 16, "sliding_window": 24, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0, "query_pre_attn_scalar": 16,
    }),
    "gemma3": ("Gemma3TextConfig", {
        **_COMMON, "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 24,
        "query_pre_attn_scalar": 16,
    }),
    "gemma4": ("Gemma4TextConfig", {
        **_COMMON, "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32,
        "sliding_window": 24, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    }),
    "cohere2": ("Cohere2Config", {
        **_COMMON, "sliding_window": 24, "logit_scale": 1.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }),
    "olmo2": ("Olmo2Config", {**_COMMON}),
    "phi3": ("Phi3Config", {**_COMMON}),
    "gpt2": ("GPT2Config", {
        "vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256,
        "bos_token_id": 1, "eos_token_id": 2,
    }),
    "bloom": ("BloomConfig", {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 3, "n_head": 4, "seq_length": 256,
        "bos_token_id": 1, "eos_token_id": 2,
    }),
    "gptj": ("GPTJConfig", {
        "vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256,
        "rotary_dim": 8, "bos_token_id": 1, "eos_token_id": 2,
    }),
    "bamba": ("BambaConfig", {
        **_COMMON, "num_hidden_layers": 5, "attn_layer_indices": [1, 3], "mamba_n_heads": 8,
        "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_conv": 4,
        "mamba_chunk_size": 8,
    }),
    "mamba2": ("Mamba2Config", {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 8,
        "head_dim": 16, "n_groups": 2, "state_size": 12, "chunk_size": 8, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0,
    }),
    "mixtral": ("MixtralConfig", {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {
        **_COMMON, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "decoder_sparse_step": 1, "norm_topk_prob": True,
    }),
    "deepseek_v3": ("DeepseekV3Config", {
        **_COMMON, "num_key_value_heads": 4, "q_lora_rank": 40, "kv_lora_rank": 48,
        "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 6,
        "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
    }),
    "glm_moe_dsa": ("GlmMoeDsaConfig", {
        **_COMMON, "num_key_value_heads": 4, "q_lora_rank": 40, "kv_lora_rank": 48,
        "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1,
        "index_topk": 19, "index_head_dim": 16, "index_n_heads": 24,
        "indexer_types": ["full", "shared", "full", "shared"],
    }),
}  # fmt: skip
STATE_FAMILIES: Families = {
    "mamba": ("MambaConfig", {
        "vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 3, "state_size": 7,
        "time_step_rank": 5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }),
    "lfm2": ("Lfm2Config", {
        **_COMMON, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
    }),
    "minimax": ("MiniMaxConfig", {
        **_COMMON, "num_hidden_layers": 3, "block_size": 8, "num_local_experts": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_experts_per_tok": 2,
    }),
    "qwen3_next": ("Qwen3NextConfig", {
        **_COMMON, "num_hidden_layers": 3, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 3,
    }),
    "recurrent_gemma": ("RecurrentGemmaConfig", {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "lru_width": 64,
        "attention_window_size": 24, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }),
    "rwkv": ("RwkvConfig", {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "attention_hidden_size": 64, "num_hidden_layers": 3,
        "context_length": 256, "bos_token_id": 1, "eos_token_id": 2,
    }),
}  # fmt: skip
"""Further families with recurrent layers."""


def make_model(family: str, known: Families = FAMILIES | STATE_FAMILIES) -> torch.nn.Module:
    """A model with random weights, large enough that its logits are far from flat."""
    import transformers

    config_class, settings = known[family]
    config = getattr(transformers, config_class)(**settings)
    torch.manual_seed(sum(map(ord, family)))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.12)
            elif "norm" in name or "ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0.0, 0.1)
    return model


def save_model(
    family: str, folder: Path, known: Families = FAMILIES | STATE_FAMILIES
) -> torch.nn.Module:
    """Make a checkpoint in ``folder``; returns the model that is the oracle."""
    model = make_model(family, known)
    # Nothing but the greedy choice is compared; an end token would cut outputs short.
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model
