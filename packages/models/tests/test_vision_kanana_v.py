"""Kanana-V beside a plain reading of the published model, on transformers' Qwen2-VL and Llama."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vision_language import TEXT, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.plain.kanana_v import PlainKananaV

VISION: dict[str, Any] = {
    "model_type": "kanana-1.5-v-visual-encoder", "depth": 2, "embed_dim": 32, "hidden_size": 32,
    "num_heads": 2, "mlp_ratio": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
PROJECTOR: dict[str, Any] = {
    "model_type": "kanana-1.5-v-visual_projector", "projector_type": "dynamic-c-abs", "depth": 2,
    "encoder_hidden_size": 32, "hidden_size": 20, "output_hidden_size": 48, "merge_size": 2,
    "mlp_depth": 2, "num_eos_tokens": 0, "pos_emb": True, "pos_emb_size": 36, "prenorm": False,
    "feature_layer_index": -1,
}  # fmt: skip


class TestKananaV(VisionConformance):
    """Positions are resampled for one image, and as stored for the other."""

    grids = ((1, 4, 8), (1, 6, 6))

    def hf_class(self) -> Any:
        return PlainKananaV

    def hf_config(self) -> Any:
        return {
            "architectures": ["KananaVForConditionalGeneration"], "model_type": "kanana-1.5-v",
            "vision_config": VISION, "projector_config": PROJECTOR, "image_token": IMAGE,
            "text_config": {**TEXT, "model_type": "kanana-1.5-3b-instruct"},
        }  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [
            {
                "pixel_values": drawn(seed, t * h * w, 3 * 2 * 4 * 4),
                "image_grid_thw": torch.tensor([t, h, w]),
            }
            for seed, (t, h, w) in enumerate(self.grids)
        ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": images}

    def test_vectors(self, model: Any) -> None:
        assert [len(vectors) for vectors in self.embed(model, self.images())] == [8, 9]

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"projector_type": "c-abs"}, "projector_type = 'c-abs'"),
            ({"feature_layer_index": -2}, "feature_layer_index = -2"),
            ({"pos_emb_size": 35}, "pos_emb_size = 35"),
            ({"merge_size": 1}, "merge_size = 1"),
            ({"prenorm": True}, "prenorm = True"),
            ({"num_eos_tokens": 2}, "num_eos_tokens = 2"),
            ({"output_hidden_size": 47}, "output_hidden_size = 47"),
        ],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(UnsupportedModel, match=named):
            self.load(self.with_config(folder, tmp_path, projector_config=change))
