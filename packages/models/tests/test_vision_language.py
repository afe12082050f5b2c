"""Families that join towers for images with decoders of text, beside transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance
from vision_names import NESTED, OtherNames

TEXT: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 3, "num_attention_heads": 3,
    "image_size": 28, "patch_size": 7,
}  # fmt: skip


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


_TOWERS_BEFORE_5 = ((r"^(image|video)_tower\.", r"\1_tower.vision_model."),)
"""Names of Video-LLaVA's as published."""


class Llava(VisionConformance):
    tower: ClassVar[dict[str, Any]]
    text = "llama"
    settings: ClassVar[dict[str, Any]] = {}

    def hf_class(self) -> Any:
        from transformers import LlavaForConditionalGeneration

        return LlavaForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import LlavaConfig

        return LlavaConfig(
            vision_config=self.tower, text_config={**TEXT, "model_type": self.text},
            image_token_index=IMAGE, **self.settings,
        )  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [{"pixel_values": drawn(seed, 3, 28, 28)} for seed in range(2)]


class TestLlavaClip(Llava):
    tower: ClassVar = {**TOWER, "model_type": "clip_vision_model"}


class TestLlavaClipWhole(Llava):
    """All states of the last layer, in front of another decoder."""

    tower: ClassVar = {**TOWER, "model_type": "clip_vision_model"}
    text = "qwen2"
    settings: ClassVar = {
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        "multimodal_projector_bias": False,
    }  # fmt: skip


class TestLlavaSiglip(Llava):
    tower: ClassVar = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
    text = "mistral"
    settings: ClassVar = {"vision_feature_select_strategy": "full"}


class TestMantis(TestLlavaSiglip):
    """The same model under a name that is given by hand."""

    text = "llama"

    def load(self, folder: Path, **settings: Any) -> Any:
        name = {"architectures": ["MantisForConditionalGeneration"]}
        return super().load(folder, hf_overrides=name, **settings)


class TestVideoLlava(OtherNames, Llava):
    """Images of the class that takes videos as well, whose towers are two."""

    spellings = (
        _TOWERS_BEFORE_5,
        (*_TOWERS_BEFORE_5, *NESTED, (r"^(image|video)_t", r"model.\1_t")),
    )

    tower: ClassVar = {**TOWER, "model_type": "clip_vision_model"}

    def hf_class(self) -> Any:
        from transformers import VideoLlavaForConditionalGeneration

        return VideoLlavaForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import VideoLlavaConfig

        text = {**TEXT, "model_type": self.text}
        return VideoLlavaConfig(
            vision_config=self.tower, text_config=text, image_token_index=IMAGE,
            video_token_index=121,
        )  # fmt: skip


class QwenVL(VisionConformance):
    grids = ((1, 4, 6), (1, 8, 2))
    numbers = 3 * 2 * 4 * 4

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [
            {
                "pixel_values": drawn(seed, t * h * w, self.numbers),
                "image_grid_thw": torch.tensor([t, h, w]),
            }
            for seed, (t, h, w) in enumerate(self.grids)
        ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {
            "pixel_values": torch.cat([image["pixel_values"] for image in images]),
            "image_grid_thw": torch.stack([image["image_grid_thw"] for image in images]),
        }

    def text(self) -> dict[str, Any]:
        rope = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 10000.0}
        return {**TEXT, "rope_parameters": rope}


class TestQwen2VL(QwenVL):
    def hf_class(self) -> Any:
        from transformers import Qwen2VLForConditionalGeneration

        return Qwen2VLForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Qwen2VLConfig

        vision = {
            "depth": 2, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 2,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
        }  # fmt: skip
        return Qwen2VLConfig(vision_config=vision, text_config=self.text(), image_token_id=IMAGE)


class TestQwen2_5VL(QwenVL):
    """Windows of two by two vectors, of which some are cut by the image's edge."""

    grids = ((1, 6, 10), (1, 8, 2))

    def hf_class(self) -> Any:
        from transformers import Qwen2_5_VLForConditionalGeneration

        return Qwen2_5_VLForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Qwen2_5_VLConfig

        vision = {
            "depth": 3, "hidden_size": 32, "out_hidden_size": 48, "num_heads": 2,
            "intermediate_size": 40, "patch_size": 4, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "window_size": 16, "fullatt_block_indexes": [1],
        }  # fmt: skip
        return Qwen2_5_VLConfig(vision_config=vision, text_config=self.text(), image_token_id=IMAGE)
