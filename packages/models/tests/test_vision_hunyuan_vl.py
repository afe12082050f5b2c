"""HunyuanOCR beside transformers: tokens of images on four axes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_vision_language import TEXT, QwenVL
from torch import Tensor
from vision_conformance import IMAGE

from headrace_core.errors import UnsupportedModel

VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
    "patch_size": 4, "max_image_size": 20,
}  # fmt: skip


class HunYuan(QwenVL):
    """Sections that end within halves of a head, and at them."""

    numbers = 3 * 4 * 4
    sections: ClassVar[list[int]] = [2, 2, 2, 2]

    def text(self) -> dict[str, Any]:
        rope = {
            "rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0,
            "mrope_section": self.sections,
        }  # fmt: skip
        return {**TEXT, "head_dim": 16, "rope_parameters": rope}

    def hf_class(self) -> Any:
        from transformers import HunYuanVLForConditionalGeneration

        return HunYuanVLForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import HunYuanVLConfig

        return HunYuanVLConfig(vision_config=VISION, text_config=self.text(), image_token_id=IMAGE)

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        """Patches row by row, not square by square."""
        made = super().hf_inputs(images)
        rows = []
        for image in images:
            _, height, width = image["image_grid_thw"].tolist()
            squares = image["pixel_values"].view(height // 2, width // 2, 2, 2, -1)
            rows.append(squares.transpose(1, 2).flatten(0, 3))
        return {**made, "pixel_values": torch.cat(rows)}


class TestHunYuanVL(HunYuan):
    @pytest.mark.parametrize(
        ("part", "change", "named"),
        [
            ("vision_config", {"interpolate_mode": "area"}, "interpolate_mode = 'area'"),
            ("text_config", {"head_dim": 12}, r"xdrope_section = \[2, 2, 2, 2\]"),
        ],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, part: str, change: Any, named: str
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        config[part] |= change
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=named):
            self.load(tmp_path)


class TestThreeAxes(HunYuan):
    """Without the number in the prompt."""

    sections: ClassVar[list[int]] = [3, 3, 2]


class TestPublishedConfig(HunYuan):
    """The language model's settings stand beside the tower's, with a kind of rotation of their own."""

    sections: ClassVar[list[int]] = [1, 4, 2, 1]

    def save(self, reference: Any, folder: Path) -> None:
        super().save(reference, folder)
        whole = json.loads((folder / "config.json").read_text())
        text = whole.pop("text_config")
        rope = text.pop("rope_parameters")
        text |= {"rope_theta": rope["rope_theta"], "attention_head_dim": text["head_dim"]}
        scaling = {
            "type": "xdrope",
            "alpha": 1000.0,
            "factor": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
        }
        text["rope_scaling"] = {**scaling, "xdrope_section": rope["mrope_section"]}
        text["model_type"] = "hunyuan_vl"
        (folder / "config.json").write_text(json.dumps({**whole, **text}))
