"""Bagel beside a plain reading of the published model on transformers' SigLIP and Qwen 3."""

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
from headrace_testing.model.plain.bagel import PlainBagel

VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 2, "image_size": 32, "patch_size": 4, "rope": False,
}  # fmt: skip
BEGIN, END = 118, 119


class TestBagel(VisionConformance):
    """Images see themselves, and the tokens around them."""

    sees_whole = True

    def hf_class(self) -> Any:
        return PlainBagel

    def hf_config(self) -> Any:
        return {
            "architectures": ["BagelForConditionalGeneration"], "model_type": "bagel",
            "llm_config": {**TEXT, "model_type": "qwen2", "hidden_act": "silu", "rope_theta": 10000.0,
                           "use_sliding_window": False},
            "vit_config": VISION, "visual_und": True, "interpolate_pos": False,
            "vit_max_num_patch_per_side": 8, "connector_act": "gelu_pytorch_tanh", "image_token": IMAGE,
        }  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [
            {
                "pixel_values": drawn(seed, rows * columns, 48),
                "image_grid": torch.tensor([rows, columns]),
            }
            for seed, (rows, columns) in enumerate([(3, 5), (8, 1)])
        ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": images}

    def prompt(self, counts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Offsets are those of the first vectors."""
        tokens, offsets = [5, 6], []
        for index, count in enumerate(counts):
            offsets.append(len(tokens) + 1)
            tokens += [BEGIN, *[IMAGE] * count, END, 7 + index]
        return [*tokens, 11, 12], offsets

    def last_keys(self, spans: Sequence[tuple[int, int]], first: int, number: int) -> Tensor:
        around = [(begin - 1, end + 1) for begin, end in spans]
        return super().last_keys(around, first, number)

    def borders(self, offsets: Sequence[int]) -> Sequence[int]:
        return [offset - 1 for offset in offsets]

    def with_config(self, folder: Path, into: Path, **changed: Any) -> Path:
        made = super().with_config(folder, into, **changed)
        (made / "model.safetensors").unlink()
        (made / "model.safetensors").symlink_to(folder / "ema.safetensors")
        return made

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"interpolate_pos": True}, "interpolate_pos"),
            ({"visual_und": False}, "visual_und"),
            ({"vit_config": {"rope": True}}, "rope"),
            (
                {"vit_config": {"image_size": 28}},
                "vit_max_num_patch_per_side = 8: vit_config has 7",
            ),
            ({"llm_config": {"use_sliding_window": True}}, "use_sliding_window"),
        ],
    )
    def test_what_is_refused(
        self, changed: dict[str, Any], message: str, reference: Any, folder: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(UnsupportedModel, match=message):
            self.load(self.with_config(folder, tmp_path, **changed))
