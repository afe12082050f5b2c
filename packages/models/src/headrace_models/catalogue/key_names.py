"""Second names that transformers reads settings of ``config.json`` by: its configs' ``attribute_map``.

The tests compare this table with the installed transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

_GPT = {
    "max_position_embeddings": "n_positions", "hidden_size": "n_embd",
    "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
}  # fmt: skip
_MPT = {"num_attention_heads": "n_heads", "hidden_size": "d_model", "num_hidden_layers": "n_layers"}
_DISTILBERT = {
    "hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
}  # fmt: skip
_KIMI = {
    "max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group", "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token", "n_shared_experts": "num_shared_experts",
}  # fmt: skip
_ROUTED = {"num_local_experts": "n_routed_experts"}
_ERNIE = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
_EXPERTS = {"num_local_experts": "num_experts"}
_LOCAL = {"num_experts": "num_local_experts"}
_MTP = {"num_mtp_layers": "num_nextn_predict_layers"}
_BLOCK_TYPES = {"layer_types": "layers_block_type"}
_ZAMBA = {**_BLOCK_TYPES, "head_dim": "attention_head_dim"}

SECOND_NAMES: Mapping[str, Mapping[str, str]] = {
    "BailingHybridForCausalLM": {**_KIMI, **_MTP},
    "BambaForCausalLM": _BLOCK_TYPES,
    "BloomForCausalLM": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    "CTRLLMHeadModel": _GPT,
    "CodeGenForCausalLM": _GPT,
    "DbrxForCausalLM": {**_MPT, "max_position_embeddings": "max_seq_len"},
    "DeepseekV2ForCausalLM": {"num_experts": "n_routed_experts"},
    "DeepseekV32ForCausalLM": _ROUTED,
    "DeepseekV3ForCausalLM": {**_ROUTED, **_MTP},
    "DistilBertForMaskedLM": _DISTILBERT,
    "DistilBertForSequenceClassification": _DISTILBERT,
    "DistilBertForTokenClassification": _DISTILBERT,
    "DistilBertModel": _DISTILBERT,
    "Dots1ForCausalLM": _ROUTED,
    "Ernie4_5_MoeForCausalLM": _ERNIE,
    "Ernie4_5_VLMoeForCausalLM": _ERNIE,
    "FalconH1ForCausalLM": _BLOCK_TYPES,
    "FlexOlmoForCausalLM": _EXPERTS,
    "GPT2LMHeadModel": _GPT,
    "GPTBigCodeForCausalLM": _GPT,
    "GPTJForCausalLM": _GPT,
    "GPTNeoForCausalLM": {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    "Glm4MoeForCausalLM": {**_ROUTED, **_MTP},
    "Glm4MoeLiteForCausalLM": {**_ROUTED, "head_dim": "qk_rope_head_dim"},
    "GlmMoeDsaForCausalLM": _ROUTED,
    "GptOssForCausalLM": _LOCAL,
    "GraniteMoeHybridForCausalLM": {"layers_block_type": "layer_types"},
    "HYV3ForCausalLM": _EXPERTS,
    "HunYuanMoEV1ForCausalLM": {**_EXPERTS, "num_experts_per_tok": "moe_topk"},
    "JambaForCausalLM": _EXPERTS,
    "JetMoeForCausalLM": {"head_dim": "kv_channels"},
    "KimiLinearForCausalLM": _KIMI,
    "Lfm3ForCausalLM": {"rms_norm_eps": "norm_eps"},
    "LongcatFlashForCausalLM": {
        **_ROUTED,
        "num_experts_per_tok": "moe_topk",
        "intermediate_size": "ffn_hidden_size",
        "moe_intermediate_size": "expert_ffn_hidden_size",
    },
    "MellumForCausalLM": {**_LOCAL, **_MTP},
    "MiMoV2FlashForCausalLM": _ROUTED,
    "MiniMaxForCausalLM": _LOCAL,
    "MiniMaxM2ForCausalLM": _LOCAL,
    "MixtralForCausalLM": _LOCAL,
    "MptForCausalLM": _MPT,
    "NemotronHForCausalLM": {**_BLOCK_TYPES, **_ROUTED},
    "OlmoeForCausalLM": _EXPERTS,
    "OpenAIGPTLMHeadModel": _GPT,
    "Qwen3MoeForCausalLM": _LOCAL,
    "RecurrentGemmaForCausalLM": {"sliding_window": "attention_window_size", **_BLOCK_TYPES},
    "RwkvForCausalLM": {"max_position_embeddings": "context_length"},
    "SolarOpenForCausalLM": _ROUTED,
    "XGLMForCausalLM": {
        "num_attention_heads": "attention_heads",
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
    },
    "Zamba2ForCausalLM": _ZAMBA,
    "ZambaForCausalLM": _ZAMBA,
}
"""Architecture -> second name -> first name."""


def by_first_names(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with what it says under a second name said under the first, too. Where it says both, the
    second name counts, as in transformers, and a difference is logged.

    Args:
        config: ``config.json``'s text part.
    """
    found = dict(config)
    for second, first in SECOND_NAMES.get(architecture, {}).items():
        value, other = config.get(second), config.get(first)
        if value is None or value == other:
            continue
        if other is not None:
            logger.warning(
                "config.json: %s = %.100r and %s = %.100r are two names of one setting: %s counts, as in "
                "transformers", second, value, first, other, second,
            )  # fmt: skip
        found[first] = value
    return found
