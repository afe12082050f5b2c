"""Pixtral's tower in front of decoders, beside transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_vision_language import TEXT, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel

TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 50, "num_hidden_layers": 3, "num_attention_heads": 2,
    "image_size": 64, "patch_size": 4, "model_type": "pixtral",
}  # fmt: skip


class PixtralConformance(VisionConformance):
    tower: ClassVar[dict[str, Any]] = TOWER
    text = "mistral"
    settings: ClassVar[dict[str, Any]] = {}
    sizes = ((16, 24), (24, 8))

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [{"pixel_values": drawn(seed, 3, *size)} for seed, size in enumerate(self.sizes)]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        pixels = [image["pixel_values"] for image in images]
        sizes = [tuple(own.shape[1:]) for own in pixels]
        largest = [max(side) for side in zip(*sizes, strict=True)]
        whole = torch.zeros(len(pixels), 3, *largest)
        for own, (height, width), into in zip(pixels, sizes, whole, strict=True):
            into[:, :height, :width] = own
        return {"pixel_values": whole, "image_sizes": torch.tensor(sizes)}


class Pixtral(PixtralConformance):
    settings: ClassVar[dict[str, Any]] = {
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
    }  # fmt: skip

    def hf_class(self) -> Any:
        from transformers import LlavaForConditionalGeneration

        return LlavaForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import LlavaConfig

        return LlavaConfig(
            vision_config=self.tower, text_config={**TEXT, "model_type": self.text},
            image_token_index=IMAGE, **self.settings,
        )  # fmt: skip


class TestPixtral(Pixtral):
    def test_other_names(self, reference: Any, folder: Path, tmp_path: Path) -> None:
        """The names of transformers' modules; its files have older ones."""
        stored = load_file(folder / "model.safetensors")
        assert "vision_tower.patch_conv.weight" in stored
        named = {}
        for name, tensor in stored.items():
            name = name.replace("language_model.model.", "language_model.")
            head = name.startswith("language_model.lm_head.")
            named[name.removeprefix("language_model.") if head else f"model.{name}"] = tensor
        assert "model.vision_tower.patch_conv.weight" in named
        save_file(named, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        own, other = self.load(folder), self.load(tmp_path)
        pairs = zip(self.embed(own, self.images()), self.embed(other, self.images()), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"vision_feature_select_strategy": "default"}, "select_strategy = 'default'"),
            ({"vision_feature_layer": [-1, -2]}, r"vision_feature_layer = \[-1, -2\]"),
            ({"vision_feature_layer": 9}, "vision_feature_layer = 9"),
            (
                {"vision_config": {**TOWER, "rope_parameters": {"rope_type": "linear"}}},
                "rope_type = 'linear'",
            ),
            ({"vision_config": {**TOWER, "hidden_size": 36}}, "heads of 18 numbers"),
        ],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], named: str
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=named):
            self.load(tmp_path)


class TestPixtralInner(Pixtral):
    """States of the last but one layer, other activations and another base of the rotation."""

    tower: ClassVar = {
        **TOWER, "hidden_act": "silu",
        "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
    }  # fmt: skip
    text = "llama"
    settings: ClassVar = {
        "vision_feature_layer": -2, "vision_feature_select_strategy": "full",
        "multimodal_projector_bias": False,
    }  # fmt: skip
