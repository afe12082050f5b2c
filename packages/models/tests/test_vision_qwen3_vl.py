"""Qwen3-VL beside transformers: features of inner layers of the tower, for the decoder's first layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_vision_language import TEXT, QwenVL
from vision_conformance import IMAGE

from headrace_core.errors import UnsupportedModel

ROPE = {
    "rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 10000.0, "mrope_interleaved": True,
}  # fmt: skip


class Qwen3VL(QwenVL):
    levels: ClassVar[list[int]] = [0, 2]
    vision: ClassVar[dict[str, Any]] = {
        "depth": 4, "hidden_size": 32, "out_hidden_size": 48, "num_heads": 2, "intermediate_size": 40,
        "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "num_position_embeddings": 25,
    }  # fmt: skip

    def vision_config(self) -> dict[str, Any]:
        return {**self.vision, "deepstack_visual_indexes": self.levels}

    def text(self) -> dict[str, Any]:
        return {**TEXT, "num_hidden_layers": 3, "head_dim": 12, "rope_parameters": ROPE}

    def hf_class(self) -> Any:
        from transformers import Qwen3VLForConditionalGeneration

        return Qwen3VLForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Qwen3VLConfig

        return Qwen3VLConfig(
            vision_config=self.vision_config(), text_config=self.text(), image_token_id=IMAGE
        )

    def test_inner_features_follow_the_vectors(self, reference: Any, model: Any) -> None:
        (vectors,) = self.embed(model, self.images()[:1])
        with torch.inference_mode():
            (grid,) = self.hf_inputs(self.images()[:1])["image_grid_thw"]
            made = reference.model.visual(self.images()[0]["pixel_values"], grid_thw=grid[None])
        expected = torch.cat((made.pooler_output, *made.deepstack_features), dim=1)
        assert vectors.shape[1] == 48 * (1 + len(self.levels))
        torch.testing.assert_close(vectors, expected, atol=self.tolerance, rtol=0)


class TestQwen3VL(Qwen3VL):
    def test_refused(self, reference: Any, folder: Path, tmp_path: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        for change, named in (
            ({"deepstack_visual_indexes": [0, 4]}, r"deepstack_visual_indexes = \[0, 4\]"),
            ({"deepstack_visual_indexes": [1, 1]}, r"deepstack_visual_indexes = \[1, 1\]"),
            ({"rope_parameters": {"rope_type": "linear"}}, "rope_type = 'linear'"),
            ({"num_heads": 16}, "heads of 2 numbers"),
        ):
            vision = {**config["vision_config"], **change}
            (tmp_path / "config.json").write_text(json.dumps({**config, "vision_config": vision}))
            with pytest.raises(UnsupportedModel, match=named):
                self.load(tmp_path)


class TestQwen3VLWithoutLevels(Qwen3VL):
    levels: ClassVar[list[int]] = []
    grids = ((1, 2, 2), (1, 12, 6))


class TestQwen3VLMoe(Qwen3VL):
    def text(self) -> dict[str, Any]:
        experts = {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
        return {**super().text(), **experts}

    def hf_class(self) -> Any:
        from transformers import Qwen3VLMoeForConditionalGeneration

        return Qwen3VLMoeForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Qwen3VLMoeConfig

        return Qwen3VLMoeConfig(
            vision_config=self.vision_config(), text_config=self.text(), image_token_id=IMAGE
        )
