"""Qwen3.5 beside transformers, with images and videos: a tower in front of delta nets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import test_vision_language as language
import test_vision_videos as videos
import torch
from test_recurrent_families import DELTA, MIXTURE
from test_vision_language import TEXT
from torch import Tensor
from vision_conformance import IMAGE

from headrace_core.errors import UnsupportedModel

ROPE = {
    "rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0, "mrope_interleaved": True,
    "partial_rotary_factor": 0.5,
}  # fmt: skip


class Qwen3_5(videos.Qwen, language.QwenVL):
    """Each two frames stand behind a text."""

    name: ClassVar[str]
    shapes = ((4, 4, 6), (3, 8, 2))
    vision: ClassVar[dict[str, Any]] = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 48, "num_heads": 2, "intermediate_size": 48,
        "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "num_position_embeddings": 25,
    }  # fmt: skip

    def times(self, video: dict[str, Tensor]) -> int:
        return int(video[videos.GRID][0])

    def text(self) -> dict[str, Any]:
        return {**TEXT, **DELTA, "num_hidden_layers": 2, "rope_parameters": ROPE}

    def save(self, reference: Any, folder: Path) -> None:
        """Files as published hold a head for several tokens."""
        head = {"mtp.fc.weight": torch.zeros(2, 2)}
        reference.save_pretrained(folder, state_dict={**reference.state_dict(), **head})

    def hf_class(self) -> Any:
        import transformers

        return getattr(transformers, f"{self.name}ForConditionalGeneration")

    def hf_config(self) -> Any:
        import transformers

        config = getattr(transformers, f"{self.name}Config")
        return config(
            vision_config=self.vision, text_config=self.text(), image_token_id=IMAGE,
            video_token_id=videos.VIDEO,
        )  # fmt: skip


class TestQwen3_5(Qwen3_5):
    name = "Qwen3_5"

    def test_vectors_for_inner_layers_are_refused(
        self, reference: Any, folder: Path, tmp_path: Path
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["vision_config"]["deepstack_visual_indexes"] = [0]
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=r"deepstack_visual_indexes = \[0\]"):
            self.load(tmp_path)


class TestQwen3_5Moe(Qwen3_5):
    name = "Qwen3_5Moe"

    def text(self) -> dict[str, Any]:
        return {**super().text(), **MIXTURE, "num_experts": 4, "num_experts_per_tok": 2}
