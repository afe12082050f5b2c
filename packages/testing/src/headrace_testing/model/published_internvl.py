"""Checkpoints of InternVL by transformers, rewritten as the model's authors publish it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NAMES = (
    (r"^vision_tower\.embeddings\.cls_token", "vision_model.embeddings.class_embedding"),
    (r"^vision_tower\.embeddings\.position_embeddings", "vision_model.embeddings.position_embedding"),
    (r"^vision_tower\.embeddings\.patch_embeddings\.projection", "vision_model.embeddings.patch_embedding"),
    (r"^vision_tower\.encoder\.layer\.", "vision_model.encoder.layers."),
    (r"\.attention\.projection_layer\.", ".attn.proj."),
    (r"\.attention\.([qk]_norm|qkv)\.", r".attn.\1."),
    (r"\.lambda_([12])$", r".ls\1"),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"^multi_modal_projector\.layer_norm\.", "mlp1.0."),
    (r"^multi_modal_projector\.linear_1\.", "mlp1.1."),
    (r"^multi_modal_projector\.linear_2\.", "mlp1.3."),
)  # fmt: skip
_KEYS = {"attention_bias": "qkv_bias", "use_qk_norm": "qk_normalization"}
"""Key of a tower's config in transformers -> in the published files."""


def published_tensors(saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of transformers' class under the published names; query, key and value as one."""
    found: dict[str, Tensor] = {}
    for name, tensor in saved.items():
        part = re.search(r"^vision_tower.*\.([qkv])_proj\.", name)
        if part is None:
            found[name] = tensor
        elif part[1] == "q":
            parts = [saved[name.replace(".q_proj.", f".{letter}_proj.")] for letter in "qkv"]
            found[name.replace(".q_proj.", ".qkv.")] = torch.cat(parts)
    for pattern, instead in _NAMES:
        found = {re.sub(pattern, instead, name): tensor for name, tensor in found.items()}
    return found


def published_config(saved: dict[str, Any]) -> dict[str, Any]:
    """``config.json`` as the published files have it."""
    tower = {_KEYS.get(key, key): value for key, value in saved["vision_config"].items()}
    for key in ("image_size", "patch_size"):
        tower[key] = tower[key][0]
    return {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "llm_config": saved["text_config"],
        "vision_config": {**tower, "model_type": "intern_vit_6b"},
        "downsample_ratio": saved["downsample_ratio"],
        "select_layer": saved["vision_feature_layer"],
        "force_image_size": tower["image_size"],
        "ps_version": "v2",
        "use_backbone_lora": 0,
        "template": "internvl2_5",
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 4,
        "pad2square": False,
    }


def publish(folder: Path) -> None:
    """Rewrite a checkpoint's tensors and config in place. Needs safetensors."""
    from safetensors.torch import load_file, save_file

    saved = load_file(folder / "model.safetensors")
    save_file(published_tensors(saved), folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(published_config(config)))
