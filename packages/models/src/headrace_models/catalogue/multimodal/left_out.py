"""What a language model's part of a published config means where it leaves a setting out.

Transformers writes into the parts of a config only what differs from the defaults of the part's class, so
that ``text_config`` of LLaVA 1.5 names neither sizes nor layers; a config that is no part has all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA: Mapping[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
}  # fmt: skip
_GEMMA: Mapping[str, Any] = {
    "vocab_size": 256_000, "hidden_size": 3072, "intermediate_size": 24_576, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
}  # fmt: skip
_GEMMA_2: Mapping[str, Any] = {
    "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "kanana-1.5-3b-instruct": _LLAMA,
    "mistral": {
        **_LLAMA, "intermediate_size": 14_336, "num_key_value_heads": 8,
        "max_position_embeddings": 131_072, "sliding_window": 4096,
    },
    "qwen2": {
        **_LLAMA, "vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
    },
    "qwen2_5_omni_text": {
        **_LLAMA, "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
    },
    "gemma": _GEMMA,
    "gemma2": {**_GEMMA_2, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    "gemma3_text": {**_GEMMA_2, "vocab_size": 262_208, "max_position_embeddings": 131_072},
}  # fmt: skip
"""``model_type`` of a language model's part -> the defaults of its class."""
