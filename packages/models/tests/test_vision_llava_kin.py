"""Tarsier and MiniMax-VL-01, which are LLaVA's and LLaVA-NeXT's kin, beside plain readings of the published
models on transformers' towers and decoders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_vision_language import TEXT, TOWER, drawn
from test_vision_llava_next import PINPOINTS
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.plain.llava_kin import PlainMiniMaxVL01, PlainTarsier

SIDE, NEWLINE, END = 4, 125, 126
CLIP: dict[str, Any] = {**TOWER, "model_type": "clip_vision_model"}


class Kin(VisionConformance):
    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": images}


class TestTarsier(Kin):
    """Ends of rows and of the image are tokens here; their vectors are the same."""

    def hf_class(self) -> Any:
        return PlainTarsier

    def hf_config(self) -> Any:
        """Without what the published class has defaults for."""
        return {
            "architectures": ["TarsierForConditionalGeneration"], "model_type": "llava",
            "vision_config": CLIP, "text_config": {**TEXT, "model_type": "llama"}, "image_token": IMAGE,
            "image_newline_idx": NEWLINE, "image_new_idx": END,
        }  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [{"pixel_values": drawn(seed, 3, 28, 28)} for seed in range(2)]

    def prompt(self, counts: Sequence[int]) -> tuple[list[int], list[int]]:
        assert set(counts) == {SIDE**2}
        item = [*[*[IMAGE] * SIDE, NEWLINE] * SIDE, END]
        tokens, offsets = [5, 6], []
        for index in range(len(counts)):
            offsets.append(len(tokens))
            tokens += [*item, 7 + index]
        return [*tokens, 11, 12], offsets

    def rows(self, offset: int, count: int) -> list[int]:
        return [offset + i // SIDE * (SIDE + 1) + i % SIDE for i in range(count)]


TEXT_01: dict[str, Any] = {
    **TEXT, "model_type": "minimax", "max_position_embeddings": 256,
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 12, "hidden_act": "silu",
    "block_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "full_attn_alpha_factor": 0.8,
    "linear_attn_alpha_factor": 0.7, "mlp_alpha_factor": 0.9, "rms_norm_eps": 1e-5,
}  # fmt: skip


class TestMiniMaxVL01(Kin):
    """An image that is cut by the rounding, and one with margins beside it."""

    sizes: ClassVar[tuple[tuple[int, int, int], ...]] = ((40, 29, 4), (100, 19, 3))

    def hf_class(self) -> Any:
        return PlainMiniMaxVL01

    def hf_config(self) -> Any:
        return {
            "architectures": ["MiniMaxVL01ForConditionalGeneration"], "model_type": "minimax_vl_01",
            "vision_config": CLIP, "text_config": TEXT_01, "image_token": IMAGE,
            "image_grid_pinpoints": PINPOINTS,
        }  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [
            {
                "pixel_values": drawn(seed, 1 + tiles, 3, 28, 28),
                "image_sizes": torch.tensor([height, width]),
            }
            for seed, (height, width, tiles) in enumerate(self.sizes)
        ]

    def test_the_published_names_of_the_text(
        self, reference: Any, folder: Path, tmp_path: Path
    ) -> None:
        """The published config has them; the tensors' names are those of the files already."""
        text = {k: v for k, v in TEXT_01.items() if k != "layer_types"}
        text |= {"model_type": "minimax_text_01", "attn_type_list": [0, 1], "rotary_dim": 12}
        for key, value in (("full_attention", 0.8), ("linear_attention", 0.7), ("mlp", 0.9)):
            text[f"layernorm_{key}_alpha"] = value
            text[f"layernorm_{key}_beta"] = 1.0
        config = {**json.loads((folder / "config.json").read_text()), "text_config": text}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        images = self.images()
        model = self.load(tmp_path)
        tokens, offsets = self.prompt([len(v) for v in self.embed(model, images)])
        found = self.forward(model, tokens, offsets, images, [len(tokens)])
        expected = self.logprobs(reference, tokens, images)
        torch.testing.assert_close(found, expected, atol=self.tolerance, rtol=0)

    def test_states_that_are_no_patches_are_refused(
        self, reference: Any, folder: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(UnsupportedModel, match="vision_feature_select_strategy = 'full'"):
            self.load(self.with_config(folder, tmp_path, vision_feature_select_strategy="full"))
