"""Tiny vision-language checkpoints with their own processors of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from image_checkpoints import TEXT, finish, save_llava
from speech_checkpoints import save_tokenizer

CLIP: dict[str, Any] = {
    "model_type": "clip_vision_model", "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 28, "patch_size": 7,
}  # fmt: skip
LLAVA = {
    "processor_class": "LlavaProcessor", "patch_size": 7, "image_token": "<image>",
    "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1,
}  # fmt: skip


def save_vipllava(folder: Path) -> Any:
    """CLIP's states of several layers in front of a Llama; images of 28 x 28, 16 tokens each."""
    from transformers import (
        CLIPImageProcessor,
        VipLlavaConfig,
        VipLlavaForConditionalGeneration,
    )

    ids = save_tokenizer(folder, ("<|endoftext|>", "<image>"))
    end = ids["<|endoftext|>"]
    text = {**TEXT, "model_type": "llama", "eos_token_id": end, "bos_token_id": None}
    torch.manual_seed(0)
    config = VipLlavaConfig(
        vision_config=CLIP, text_config=text, image_token_index=ids["<image>"],
        vision_feature_layer=[-2, -1], pad_token_id=end, eos_token_id=end,
    )  # fmt: skip
    CLIPImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    ).save_pretrained(folder)
    made = finish(folder, VipLlavaForConditionalGeneration(config), "<image>", end)
    add_processor(folder, LLAVA)
    return made


def save_llava_with_processor(folder: Path) -> Any:
    made = save_llava(folder)
    add_processor(folder, LLAVA)
    return made


def save_paddleocr_vl(folder: Path) -> Any:
    """Images of their own size, a token for every 28 x 28 pixels, in time, height and width."""
    from transformers import (
        PaddleOCRVLConfig,
        PaddleOCRVLForConditionalGeneration,
        PaddleOCRVLImageProcessor,
    )

    ids = save_tokenizer(folder, ("<|endoftext|>", "<image>"))
    end = ids["<|endoftext|>"]
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 56, "patch_size": 14, "spatial_merge_size": 2,
    }  # fmt: skip
    text = {
        **TEXT, "head_dim": 16, "rope_parameters": rope, "eos_token_id": end, "pad_token_id": end,
        "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    config = PaddleOCRVLConfig(
        vision_config=vision, text_config=text, image_token_id=ids["<image>"]
    )
    PaddleOCRVLImageProcessor(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 20).save_pretrained(
        folder
    )
    made = finish(folder, PaddleOCRVLForConditionalGeneration(config), "<image>", end)
    add_processor(folder, {"processor_class": "PaddleOCRVLProcessor"}, image_token="<image>")
    return made


def add_processor(folder: Path, settings: dict[str, Any], **tokens: str) -> None:
    """What transformers needs to find a folder's processor."""
    (folder / "processor_config.json").write_text(json.dumps(settings))
    file = folder / "tokenizer_config.json"
    stated = json.loads(file.read_text())
    stated |= {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|endoftext|>", **tokens}
    file.write_text(json.dumps(stated))
