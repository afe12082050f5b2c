"""Texts and images in one space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_models.catalogue.multimodal.wrapper import Wrapper

_CLIP_TEXT: Mapping[str, Any] = {
    "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 8, "max_position_embeddings": 77, "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5, "eos_token_id": 49407, "projection_dim": 512,
}  # fmt: skip
_SIGLIP_TEXT: Mapping[str, Any] = {
    "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "max_position_embeddings": 64, "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6, "pad_token_id": 1,
}  # fmt: skip
ROWS = (
    Wrapper(
        "CLIPModel",
        {"clip_text_model": "CLIPTextModelWithProjection"},
        "CLIP",
        ("vision_model", "visual_projection", "logit_scale"),
        towers={"": "vision_language.clip:Clip"},
        defaults=_CLIP_TEXT,
        shared=("projection_dim",),
        task="pool",
    ),
    Wrapper(
        "SiglipModel",
        {"siglip_text_model": "SiglipTextModel"},
        "SigLIP, SigLIP 2 of one resolution",
        ("vision_model", "logit_scale", "logit_bias"),
        towers={"": "vision_language.siglip:Siglip"},
        defaults=_SIGLIP_TEXT,
        task="pool",
    ),
    Wrapper(
        "Siglip2Model",
        {"siglip2_text_model": "SiglipTextModel"},
        "SigLIP 2 NaFlex",
        ("vision_model", "logit_scale", "logit_bias"),
        towers={"": "vision_language.siglip:Siglip2"},
        defaults=_SIGLIP_TEXT,
        task="pool",
    ),
)
