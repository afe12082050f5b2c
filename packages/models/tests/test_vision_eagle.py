"""Eagle 2.5 beside a plain reading of it: SigLIP and Qwen2 are transformers'."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_vision_language import TEXT
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.plain.eagle import PlainEagle

SIDE, PATCH = 16, 4
TOWER: dict[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 50,
    "num_hidden_layers": 5, "num_attention_heads": 2, "image_size": SIDE, "patch_size": PATCH,
}  # fmt: skip


class Eagle(VisionConformance):
    layer: ClassVar[int]

    def hf_class(self) -> Any:
        return PlainEagle

    def hf_config(self) -> Any:
        return {
            "architectures": ["Eagle2_5_VLForConditionalGeneration"], "model_type": "eagle_2_5_vl",
            "text_config": {
                **TEXT, "model_type": "qwen2", "tie_word_embeddings": False, "hidden_act": "silu",
                "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            },
            "vision_config": TOWER, "force_image_size": SIDE, "downsample_ratio": 0.5,
            "select_layer": self.layer, "image_token_index": IMAGE, "image_token": IMAGE,
        }  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        """Of three tiles and of one."""
        draw = torch.Generator().manual_seed(0)
        return [{"pixel_values": torch.rand(n, 3, SIDE, SIDE, generator=draw)} for n in (3, 1)]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": images}

    def test_other_pixels_are_another_image(self, model: Any) -> None:
        """A tile of an image changes its own vectors, and no others."""
        first = self.images()[0]["pixel_values"]
        changed = torch.cat((first[:1].flip(2), first[1:]))
        own, other = self.embed(model, [{"pixel_values": first}, {"pixel_values": changed}])
        differs = (own - other).abs().amax(dim=1) > 1e-4
        assert differs.tolist() == [True] * 4 + [False] * 8


class TestEagle(Eagle):
    """The tower's last states, behind its norm."""

    layer = -1

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"use_llm_lora": 64}, "use_llm_lora = 64"),
            ({"use_backbone_lora": 16}, "use_backbone_lora = 16"),
            ({"force_image_size": 448}, "force_image_size = 448"),
            ({"downsample_ratio": 0.3}, "downsample_ratio = 0.3"),
            ({"select_layer": 9}, "= 9"),
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


class TestEagleWithALayerWithin(Eagle):
    """The states of a layer, without the norm; the config may leave out which."""

    layer = -4

    def test_the_layer_may_be_left_out(self, model: Any, folder: Path, tmp_path: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        del config["select_layer"], config["force_image_size"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        own = self.embed(model, self.images())
        for a, b in zip(own, self.embed(self.load(tmp_path), self.images()), strict=True):
            torch.testing.assert_close(a, b, atol=0, rtol=0)
