"""Tiny retrievers of pages with random weights, made by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from image_checkpoints import CHAT, TEXT
from speech_checkpoints import save_tokenizer

from headrace_testing.model.decoders import randomise

PAD = "<|endoftext|>"


def finish(folder: Path, model: Any, bos: str | None) -> Any:
    """Save a model whose tokenizer has the chat template of the model in it, which is not its own."""
    randomise(model.eval())
    model.save_pretrained(folder)
    named = {"chat_template": CHAT, "pad_token": PAD, "eos_token": PAD, "bos_token": bos}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return model


def save_colqwen2(folder: Path) -> Any:
    """ColQwen2: a token for every 16 x 16 pixels. Returns the model that is the oracle."""
    from transformers import (
        ColQwen2Config,
        ColQwen2ForRetrieval,
        Qwen2VLConfig,
        Qwen2VLImageProcessor,
    )

    names = (
        PAD,
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|image_pad|>",
        "<|vision_end|>",
    )
    ids = save_tokenizer(folder, names)
    vision = {
        "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2,
        "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    text = {**TEXT, "rope_parameters": rope, "eos_token_id": ids[PAD], "bos_token_id": None}
    inner = Qwen2VLConfig(
        vision_config=vision, text_config=text, image_token_id=ids["<|image_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = ColQwen2ForRetrieval(ColQwen2Config(vlm_config=inner, embedding_dim=24))
    Qwen2VLImageProcessor(
        patch_size=8,
        merge_size=2,
        size={"shortest_edge": 16 * 16 * 4, "longest_edge": 16 * 16 * 30},
    ).save_pretrained(folder)
    return finish(folder, model, None)


def save_colpali(folder: Path) -> Any:
    """ColPali: 16 tokens for an image, in front of a Gemma. Returns the model that is the oracle."""
    from transformers import (
        ColPaliConfig,
        ColPaliForRetrieval,
        PaliGemmaConfig,
        SiglipImageProcessor,
    )

    ids = save_tokenizer(folder, (PAD, "<bos>", "<image>"))
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 28, "patch_size": 7,
        "vision_use_head": False, "projection_dim": 64,
    }  # fmt: skip
    text = {
        **TEXT, "model_type": "gemma", "head_dim": 16, "eos_token_id": ids[PAD],
        "bos_token_id": ids["<bos>"], "pad_token_id": ids[PAD],
    }  # fmt: skip
    inner = PaliGemmaConfig(
        vision_config=vision, text_config=text, image_token_index=ids["<image>"], projection_dim=64,
        bos_token_id=ids["<bos>"], eos_token_id=ids[PAD], pad_token_id=ids[PAD],
    )  # fmt: skip
    torch.manual_seed(0)
    model = ColPaliForRetrieval(ColPaliConfig(vlm_config=inner, embedding_dim=24))
    SiglipImageProcessor(size={"height": 28, "width": 28}).save_pretrained(folder)
    return finish(folder, model, "<bos>")
