"""OpenCUA and Tarsier2 beside the parts of transformers that they are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import test_vision_language as language
import test_vision_videos as videos
from safetensors.torch import load_file, save_file
from test_vision_language import TEXT, QwenVL
from torch import Tensor
from vision_conformance import IMAGE

from headrace_testing.model.plain.media import PlainMedia

VISION: dict[str, Any] = {
    "depth": 3, "hidden_size": 32, "out_hidden_size": 48, "num_heads": 2, "intermediate_size": 40,
    "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16,
    "fullatt_block_indexes": [1],
}  # fmt: skip


class TestOpenCUA(QwenVL):
    grids = ((1, 6, 10), (1, 8, 2))

    def hf_class(self) -> Any:
        return opencua

    def hf_config(self) -> Any:
        text = {**TEXT, "model_type": "qwen2", "tie_word_embeddings": False}
        text |= {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
        return {
            "architectures": ["OpenCUAForConditionalGeneration"], "model_type": "opencua",
            "text_config": text, "vision_config": VISION, "image_token": IMAGE,
            "media_placeholder_token_id": IMAGE,
        }  # fmt: skip

    def hf_inputs(self, images: Any) -> dict[str, Any]:
        return {"images": images}


def opencua(config: dict[str, Any]) -> PlainMedia:
    from transformers import Qwen2_5_VLVisionConfig, Qwen2Config, Qwen2ForCausalLM
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
        Qwen2_5_VisionTransformerPretrainedModel,
    )

    tower = Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**VISION))

    def embed(image: Any) -> Tensor:
        made = tower(image["pixel_values"], grid_thw=image["image_grid_thw"][None])
        found: Tensor = made.pooler_output
        return found

    text = Qwen2ForCausalLM(Qwen2Config(**TEXT, tie_word_embeddings=False))
    return PlainMedia(config, text, ("vision_tower", tower), embed, "language_model.")


class TestTarsier2(videos.Qwen, language.TestQwen2VL):
    """Qwen2-VL, with a tower and a language model under other names, and an overridden config."""

    def save(self, reference: Any, folder: Path) -> None:
        super().save(reference, folder)
        tensors = load_file(folder / "model.safetensors")
        save_file({_named(k): v for k, v in tensors.items()}, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
        config["text_config"]["model_type"] = "qwen2_vl"
        (folder / "config.json").write_text(json.dumps(config))

    def load(self, folder: Path, **settings: Any) -> Any:
        names = {"architectures": ["Tarsier2ForConditionalGeneration"], "model_type": "tarsier2"}
        return super().load(folder, hf_overrides=names, **settings)

    def hf_class(self) -> Any:
        made = super().hf_class()
        return type("Tarsier2ForConditionalGeneration", (made,), {})


def _named(name: str) -> str:
    for own, theirs in (
        ("visual.", "vision_tower."), ("model.visual.", "vision_tower."),
        ("lm_head.", "language_model.lm_head."),
        ("model.language_model.", "language_model.model."),
    ):  # fmt: skip
        if name.startswith(own):
            return theirs + name.removeprefix(own)
    return name
