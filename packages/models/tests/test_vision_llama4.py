"""Llama 4 with images beside transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_vision_internvl import InternVLConformance
from test_vision_language import TEXT, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel

TOWER: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 24, "patch_size": 4, "projector_input_dim": 40, "projector_output_dim": 40,
    "vision_output_dim": 40,
}  # fmt: skip
MIXTURE: dict[str, Any] = {
    "intermediate_size_mlp": 64, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 1,
    "no_rope_layers": [1, 0], "attention_chunk_size": 16, "interleave_moe_layer_step": 2,
}  # fmt: skip


class Llama4(VisionConformance):
    tower: ClassVar[dict[str, Any]] = TOWER

    def hf_class(self) -> Any:
        from transformers import Llama4ForConditionalGeneration

        return Llama4ForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Llama4Config

        return Llama4Config(
            vision_config=self.tower, text_config={**TEXT, **MIXTURE}, image_token_index=IMAGE,
            boi_token_index=121, eoi_token_index=122,
        )  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        """Of three tiles and of one."""
        side = self.tower["image_size"]
        return [{"pixel_values": drawn(count, count, 3, side, side)} for count in (3, 1)]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"pixel_values": torch.cat([image["pixel_values"] for image in images])}

    test_other_pixels_are_another_image = InternVLConformance.test_other_pixels_are_another_image


class TestLlama4(Llama4):
    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"pixel_shuffle_ratio": 0.3}, "pixel_shuffle_ratio = 0.3"),
            ({"pixel_shuffle_ratio": 0.25}, "pixel_shuffle_ratio = 0.25"),
            ({"intermediate_size": 100}, "intermediate_size = 100"),
            ({"projector_input_dim": 20}, "projector_input_dim = 20"),
            ({"vision_output_dim": 20}, "vision_output_dim = 20"),
            ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
            ({"num_attention_heads": 4}, "heads of 6"),
            ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type = 'yarn'"),
        ],
    )  # fmt: skip
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], named: str
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["vision_config"] |= change
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=named):
            self.load(tmp_path)


class TestLlama4OfWiderSquares(Llama4):
    """Sixteen patches are a vector; heads of one pair of numbers an axis; another base."""

    tower: ClassVar = {
        **TOWER, "hidden_size": 8, "intermediate_size": 128, "image_size": 16,
        "pixel_shuffle_ratio": 0.25, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
    }  # fmt: skip
