"""Tiny checkpoints with random weights that take images and videos, made by transformers."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from image_checkpoints import TEXT, finish
from speech_checkpoints import save_tokenizer

from headrace_testing.videos import frames, written

QWEN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
QWEN_FILM = "<|vision_start|><|video_pad|><|vision_end|>"
QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
QWEN_TOWER = {
    "depth": 3, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip


def video_file(count: int = 24, **settings: Any) -> bytes:
    """An MP4 of 8 frames a second, 48 x 64 pixels."""
    return written(frames(count), **settings)


def video_url(data: bytes) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(data).decode()}"


def _settings(folder: Path, images: Mapping[str, Any], videos: Mapping[str, Any]) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))


def _qwen(folder: Path, name: str, tower: Mapping[str, Any], **text: Any) -> Any:
    import transformers

    ids = save_tokenizer(folder, ("<|endoftext|>", *QWEN))
    end = ids["<|endoftext|>"]
    config = getattr(transformers, f"{name}Config")(
        vision_config={**QWEN_TOWER, **tower},
        text_config={**TEXT, "rope_parameters": ROPE, "eos_token_id": end, "bos_token_id": None, **text},
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    torch.manual_seed(0)
    size = {"shortest_edge": 16 * 16 * 4, "longest_edge": 16 * 16 * 30}
    both = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
    films = {**size, "longest_edge": size["longest_edge"] * (2 if name == "Qwen3VL" else 1)}
    _settings(folder, {**both, "size": size}, {**both, "size": films})
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return finish(folder, model, QWEN_MARK, end, QWEN_FILM)


def save_qwen2(folder: Path) -> Any:
    return _qwen(folder, "Qwen2VL", {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2})


def save_qwen2_5(folder: Path) -> Any:
    tower = {
        "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 40, "window_size": 32,
        "fullatt_block_indexes": [1], "tokens_per_second": 2,
    }  # fmt: skip
    return _qwen(folder, "Qwen2_5_VL", tower)


def save_qwen3(folder: Path) -> Any:
    tower = {
        "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 40,
        "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    rope = {**ROPE, "mrope_interleaved": True}
    return _qwen(folder, "Qwen3VL", tower, head_dim=16, rope_parameters=rope)


def save_onevision(folder: Path) -> Any:
    """Frames of 28 x 28, four tokens each."""
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

    ids = save_tokenizer(folder, ("<|endoftext|>", "<image>", "<video>"))
    end = ids["<|endoftext|>"]
    tower = {
        "model_type": "siglip_vision_model", "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 28, "patch_size": 7,
        "vision_use_head": False,
    }  # fmt: skip
    pinpoints = [[28, 28], [28, 56], [56, 28]]
    config = LlavaOnevisionConfig(
        vision_config=tower,
        text_config={**TEXT, "model_type": "qwen2", "eos_token_id": end, "bos_token_id": None},
        image_token_index=ids["<image>"], video_token_index=ids["<video>"],
        image_grid_pinpoints=pinpoints,
    )  # fmt: skip
    torch.manual_seed(0)
    size = {"height": 28, "width": 28}
    _settings(folder, {"size": size, "image_grid_pinpoints": pinpoints}, {"size": size})
    model = LlavaOnevisionForConditionalGeneration(config)
    return finish(folder, model, "<image>", end, "<video>")


def save_internvl(folder: Path) -> Any:
    """Frames of 28 x 28, four vectors each."""
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    names = ("<IMG_CONTEXT>", "<img>", "</img>", "<video>")
    ids = save_tokenizer(folder, ("<|endoftext|>", *names))
    end = ids["<|endoftext|>"]
    tower = {
        "model_type": "internvl_vision", "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": [28, 28],
        "patch_size": [7, 7],
    }  # fmt: skip
    config = InternVLConfig(
        vision_config=tower,
        text_config={**TEXT, "model_type": "qwen2", "eos_token_id": end, "bos_token_id": None},
        image_token_id=ids["<IMG_CONTEXT>"],
    )
    torch.manual_seed(0)
    size = {"size": {"height": 28, "width": 28}}
    _settings(folder, {**size, "max_patches": 2}, size)
    return finish(folder, InternVLForConditionalGeneration(config), "<IMG_CONTEXT>", end, "<video>")


def save_smolvlm(folder: Path) -> Any:
    """Frames of 28 x 28, four vectors each; a prompt marks a video by a text that is no token."""
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    names = ("<image>", "<fake_token_around_image>", "<global-img>")
    ids = save_tokenizer(folder, ("<|endoftext|>", *names))
    end = ids["<|endoftext|>"]
    tower = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 3,
        "image_size": 28, "patch_size": 7,
    }  # fmt: skip
    text = {**TEXT, "model_type": "llama", "eos_token_id": end, "bos_token_id": None}
    config = SmolVLMConfig(
        vision_config=tower, text_config={**text, "pad_token_id": end},
        image_token_id=ids["<image>"], scale_factor=2,
    )  # fmt: skip
    torch.manual_seed(0)
    side = {"longest_edge": 28}
    size = {"size": side, "max_image_size": side, "do_image_splitting": False}
    _settings(folder, size, size)
    return finish(folder, SmolVLMForConditionalGeneration(config), "<image>", end, "<video>")


FAMILIES: Mapping[str, tuple[Callable[[Path], Any], str, str]] = {
    "qwen2_vl": (save_qwen2, QWEN_MARK, QWEN_FILM),
    "qwen2_5_vl": (save_qwen2_5, QWEN_MARK, QWEN_FILM),
    "qwen3_vl": (save_qwen3, QWEN_MARK, QWEN_FILM),
    "onevision": (save_onevision, "<image>", "<video>"),
    "internvl": (save_internvl, "<IMG_CONTEXT>", "<video>"),
    "smolvlm": (save_smolvlm, "<image>", "<video>"),
}
"""Family -> its saving, and how a prompt marks an image and a video."""
