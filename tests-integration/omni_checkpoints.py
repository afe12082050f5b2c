"""Tiny checkpoints of models that see and hear, with random weights, made by transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from image_checkpoints import TEXT
from speech_checkpoints import save_tokenizer

from headrace_testing.model.decoders import randomise

SECONDS = 4
"""The longest recording."""
MARKS: Mapping[str, str] = {
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}
"""Modality -> what stands for an item in a prompt of Qwen2.5-Omni."""
QWEN3_MARKS: Mapping[str, str] = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
    "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
}
"""The same of Qwen3-Omni."""
NAMES = (
    "<|endoftext|>", "<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>", "<|IMAGE|>",
    "<|VIDEO|>", "<|AUDIO|>",
)  # fmt: skip
QWEN3_NAMES = (
    "<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|audio_start|>", "<|audio_end|>",
    "<|image_pad|>", "<|video_pad|>", "<|audio_pad|>",
)  # fmt: skip
_CHAT = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type in marks %}"
    "{{ marks[part.type] }}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "assistant:"
)


def save_qwen2_5_omni(folder: Path) -> Any:
    """A thinker as it is published, in a config with a talker; returns transformers' class of it."""
    from transformers import (
        Qwen2_5OmniThinkerConfig,
        Qwen2_5OmniThinkerForConditionalGeneration,
    )

    ids = save_tokenizer(folder, NAMES)
    end = ids["<|endoftext|>"]
    vision = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 40,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    audio = {
        "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2,
        "encoder_ffn_dim": 40, "max_source_positions": 50, "n_window": 20, "output_dim": 64,
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    text = {**TEXT, "rope_parameters": rope, "eos_token_id": end, "max_position_embeddings": 1024}
    torch.manual_seed(0)
    config = Qwen2_5OmniThinkerConfig(
        audio_config=audio, vision_config=vision, text_config=text,
        image_token_index=ids["<|IMAGE|>"], video_token_index=ids["<|VIDEO|>"],
        audio_token_index=ids["<|AUDIO|>"], vision_start_token_id=ids["<|vision_bos|>"],
        audio_start_token_id=ids["<|audio_bos|>"],
    )  # fmt: skip
    model = Qwen2_5OmniThinkerForConditionalGeneration(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    _publish(folder, "Qwen2_5OmniModel", end, MARKS)
    return model


def save_qwen3_omni(folder: Path) -> Any:
    """A thinker whose first layers get vectors of images, too; returns transformers' class of it."""
    from transformers import (
        Qwen3OmniMoeThinkerConfig,
        Qwen3OmniMoeThinkerForConditionalGeneration,
    )

    ids = save_tokenizer(folder, QWEN3_NAMES)
    end = ids["<|endoftext|>"]
    vision = {
        "depth": 3, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 40,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    audio = {
        "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2,
        "encoder_ffn_dim": 40, "n_window": 50, "n_window_infer": 100, "downsample_hidden_size": 8,
        "output_dim": 64,
    }  # fmt: skip
    rope = {
        "rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0,
        "mrope_interleaved": True,
    }  # fmt: skip
    text = {
        **TEXT, "head_dim": 16, "rope_parameters": rope, "eos_token_id": end, "bos_token_id": None,
        "max_position_embeddings": 1024, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    }  # fmt: skip
    torch.manual_seed(0)
    config = Qwen3OmniMoeThinkerConfig(
        audio_config=audio, vision_config=vision, text_config=text, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], audio_token_id=ids["<|audio_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], audio_start_token_id=ids["<|audio_start|>"],
        position_id_per_seconds=12,
    )  # fmt: skip
    model = Qwen3OmniMoeThinkerForConditionalGeneration(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    _publish(folder, "Qwen3OmniMoeForConditionalGeneration", end, QWEN3_MARKS)
    return model


def _publish(folder: Path, name: str, end: int, marks: Mapping[str, str]) -> None:
    thinker = json.loads((folder / "config.json").read_text())
    whole = {
        "architectures": [name], "model_type": "omni", "thinker_config": thinker, "talker_config": {},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(whole))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    settings = {
        "feature_size": 16, "chunk_length": SECONDS, "n_fft": 400, "hop_length": 160, "dither": 0.0,
        "sampling_rate": 16000, "min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 20, "patch_size": 14,
        "temporal_patch_size": 2, "merge_size": 2,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    chat = f"{{% set marks = {json.dumps(dict(marks))} %}}{_CHAT}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat}))
