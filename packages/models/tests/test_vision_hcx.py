"""HyperCLOVA X Seed Vision 3B beside a plain reading of the published model, on transformers' SigLIP and
Llama."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vision_language import TEXT, TOWER, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel
from headrace_models.config.settings import Settings
from headrace_models.families.vision_language.hcx_vision import _canvases
from headrace_testing.model.plain.hcx_vision import PlainHCXVision

VISION: dict[str, Any] = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
SIZES = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]


class TestHCXVision(VisionConformance):
    """Four times four states of a tile become three times three vectors."""

    sizes = ((40, 29, 4), (100, 19, 3))

    def hf_class(self) -> Any:
        return PlainHCXVision

    def hf_config(self) -> Any:
        return {
            "architectures": ["HCXVisionForCausalLM"], "model_type": "hyperclovax_vlm",
            "vision_config": VISION, "image_token": IMAGE, "mm_projector_type": "cabstractor",
            "text_config": {**TEXT, "model_type": "llama", "max_position_embeddings": 256},
            "num_queries_vis_abstractor_image": 9, "use_nth_layer": -2, "possible_resolutions": SIZES,
            "anyres": True, "unpad": True, "proj_pos_emb": True, "proj_prenorm": False,
        }  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [
            {
                "pixel_values": drawn(seed, 1 + tiles, 3, 28, 28),
                "image_sizes": torch.tensor([height, width]),
            }
            for seed, (height, width, tiles) in enumerate(self.sizes)
        ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": images}

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"mm_projector_type": "mlp"}, "mm_projector_type = 'mlp'"),
            ({"unpad": False}, "unpad = False"),
            ({"use_nth_layer": [1]}, r"use_nth_layer = \[1\]"),
            ({"num_queries_vis_abstractor_image": 8}, "num_queries_vis_abstractor_image = 8"),
            ({"possible_resolutions": [[28, 30]]}, r"\[\[28, 30\]\]"),
        ],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(UnsupportedModel, match=named):
            self.load(self.with_config(folder, tmp_path, **change))


def test_canvases_that_are_not_listed() -> None:
    """As the published code counts them."""
    assert _canvases(Settings({"max_num_grids": 3}), 10) == [(10, 20), (10, 30), (20, 10), (30, 10)]
    assert _canvases(Settings({"max_num_grids": 1, "use_1x1_grid": True}), 10) == [(10, 10)]
