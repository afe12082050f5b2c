"""LFM2-VL beside transformers: images of their own shape and in tiles, in front of a recurrent decoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_vision_language import TEXT, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance
from vision_names import PUBLISHED, OtherNames

from headrace_core.errors import UnsupportedModel

PATCH = 4
TOWER: dict[str, Any] = {
    "model_type": "siglip2_vision_model", "hidden_size": 36, "intermediate_size": 50,
    "num_hidden_layers": 2, "num_attention_heads": 3, "patch_size": PATCH, "num_patches": 25,
    "vision_use_head": False,
}  # fmt: skip


class Lfm2Vl(VisionConformance):
    grids: ClassVar[Sequence[Sequence[tuple[int, int]]]] = (((4, 8), (4, 4), (2, 6)), ((6, 2),))
    settings: ClassVar[dict[str, Any]] = {}
    vision: ClassVar[dict[str, Any]] = {}

    def hf_class(self) -> Any:
        from transformers import Lfm2VlForConditionalGeneration

        return Lfm2VlForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Lfm2VlConfig

        text = {
            **TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"],
            "num_hidden_layers": 3, "block_multiple_of": 8,
        }  # fmt: skip
        return Lfm2VlConfig(
            vision_config={**TOWER, **self.vision}, text_config=text, image_token_id=IMAGE,
            projector_hidden_size=40, **self.settings,
        )  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [
            {
                "pixel_values": drawn(seed, sum(r * c for r, c in own), 3 * PATCH**2),
                "spatial_shapes": torch.tensor(own),
            }
            for seed, own in enumerate(self.grids)
        ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        shapes = torch.cat([image["spatial_shapes"] for image in images])
        counts = shapes.prod(1)
        flat = torch.split(torch.cat([x["pixel_values"] for x in images]), counts.tolist())
        values = torch.nn.utils.rnn.pad_sequence(list(flat), batch_first=True)
        mask = torch.arange(values.shape[1])[None] < counts[:, None]
        return {
            "pixel_values": values, "spatial_shapes": shapes, "pixel_attention_mask": mask.int(),
        }  # fmt: skip


class TestLfm2Vl(OtherNames, Lfm2Vl):
    """The table of places becomes smaller and larger, each way of its own."""

    spellings = (PUBLISHED,)

    def test_other_pixels_are_another_image(self, model: Any) -> None:
        """A tile of an image changes its own vectors, and no others."""
        first = self.images()[0]
        pixels = torch.cat((first["pixel_values"][:32].flip(1), first["pixel_values"][32:]))
        own, other = self.embed(model, [first, {**first, "pixel_values": pixels}])
        differs = (own - other).abs().amax(dim=1) > 1e-4
        assert differs.tolist() == [True] * 8 + [False] * (len(own) - 8)

    @pytest.mark.parametrize(
        ("change", "vision", "named"),
        [({}, {"num_patches": 24}, "num_patches = 24"),
         ({"vision_feature_layer": -2}, {}, "vision_feature_layer = -2")],
    )  # fmt: skip
    def test_refused(self, change: Any, vision: Any, named: str, tmp_path: Path) -> None:
        config = self.hf_config()
        for key, value in change.items():
            setattr(config, key, value)
        for key, value in vision.items():
            setattr(config.vision_config, key, value)
        self.hf_class()(config).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match=named):
            self.load(tmp_path)


class TestLfm2VlOtherSettings(Lfm2Vl):
    """Nine patches a vector, no norm, no biases; the tower has a head that is not read."""

    grids = (((3, 6),), ((9, 3), (3, 3)))
    settings: ClassVar = {
        "downsample_factor": 3, "projector_use_layernorm": False, "projector_bias": False,
    }  # fmt: skip
    vision: ClassVar = {"vision_use_head": True}
