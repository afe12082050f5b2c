"""Keye-VL and Keye-VL 1.5 beside a plain reading: the tower is PaddleOCR-VL's in transformers, the decoder
Qwen 3's with another rotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from test_vision_language import TEXT, QwenVL
from torch import Tensor, nn
from vision_conformance import IMAGE

from headrace_testing.model.plain_media import Image, PlainMedia

PATCH, SIZE, HALF = 4, 32, 6
VISION: dict[str, Any] = {
    "hidden_size": SIZE, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 20, "patch_size": PATCH, "spatial_merge_size": 2,
}  # fmt: skip


class Turning(nn.Module):
    """Rotation by time, height and width, each for two of six frequencies."""

    places: Tensor

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        turning = 10000.0 ** -(torch.arange(HALF) / HALF)
        angles = self.places[torch.arange(HALF) // 2].T * turning
        both = torch.cat([angles, angles], dim=-1)[None]
        return both.cos(), both.sin()


class Projector(nn.Module):
    """Args: joined: the norm is of four states together."""

    def __init__(self, *, joined: bool) -> None:
        super().__init__()
        self.pre_norm = nn.LayerNorm(4 * SIZE if joined else SIZE, eps=1e-5)
        self.linear_1, self.linear_2 = nn.Linear(4 * SIZE, 4 * SIZE), nn.Linear(4 * SIZE, 48)
        self.joined = joined

    def forward(self, squares: Tensor) -> Tensor:
        """squares [squares, 4, SIZE]."""
        x = self.pre_norm(squares.flatten(1) if self.joined else squares).flatten(1)
        made: Tensor = self.linear_2(nn.functional.gelu(self.linear_1(x)))
        return made


class PlainKeye(PlainMedia):
    def __init__(self, config: dict[str, Any], *, joined: bool) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM
        from transformers.models.paddleocr_vl.configuration_paddleocr_vl import (
            PaddleOCRVisionConfig,
        )
        from transformers.models.paddleocr_vl.modeling_paddleocr_vl import PaddleOCRVisionModel

        text = Qwen3ForCausalLM(Qwen3Config(**TEXT, head_dim=12, tie_word_embeddings=False))
        turning = Turning()
        text.model.rotary_emb = turning
        parts: Any = nn.Module()
        parts.visual = PaddleOCRVisionModel(PaddleOCRVisionConfig(**VISION))
        parts.mlp_AR = Projector(joined=joined)
        whole: Any = parts.visual.vision_model
        whole.head = nn.LayerNorm(SIZE)  # files have both, and images of any size need neither
        whole.embeddings.packing_position_embedding = nn.Embedding(8, SIZE)

        def embed(image: Image) -> Tensor:
            _, height, width = image["image_grid_thw"].tolist()
            squares = (height // 2, width // 2, 2, 2)
            rows = image["pixel_values"].view(*squares, -1).transpose(1, 2).flatten(0, 3)
            states = parts.visual(
                rows.view(1, -1, 3, PATCH, PATCH), grid_thw=image["image_grid_thw"][None]
            ).last_hidden_state
            cut = states.view(height // 2, 2, width // 2, 2, SIZE).transpose(1, 2)
            made: Tensor = parts.mlp_AR(cut.reshape(-1, 4, SIZE))
            return made

        super().__init__(config, text, ("", parts), embed)
        self.turning = turning

    def place(self, input_ids: Tensor, images: Sequence[Image]) -> None:
        """Text counts on; an image's tokens stand in a box, and text goes on behind its longest side."""
        found: list[tuple[int, int, int]] = []
        begin, at, grids = 0, 0, [image["image_grid_thw"].tolist() for image in images]
        while at < len(input_ids):
            if input_ids[at] != IMAGE:
                found.append((begin, begin, begin))
                at, begin = at + 1, begin + 1
                continue
            _, height, width = grids.pop(0)
            box = [
                (begin, begin + y, begin + x) for y in range(height // 2) for x in range(width // 2)
            ]
            found += box
            at, begin = at + len(box), begin + max(height, width) // 2
        self.turning.places = torch.tensor(found, dtype=torch.float32).T


class Keye(QwenVL):
    numbers = 3 * PATCH * PATCH
    joined: ClassVar[bool]
    name: ClassVar[str]

    def hf_class(self) -> Any:
        return lambda config: PlainKeye(config, joined=self.joined)

    def hf_config(self) -> Any:
        rope = {"type": "default", "mrope_section": [2, 2, 2]}
        return {
            "architectures": [f"{self.name}ForConditionalGeneration"], "model_type": self.name,
            "vision_config": VISION, "image_token_id": IMAGE, "image_token": IMAGE, **TEXT,
            "head_dim": 12, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "rope_scaling": rope, "attention_bias": False, "tie_word_embeddings": False,
        }  # fmt: skip

    def hf_inputs(self, images: Any) -> dict[str, Any]:
        return {"images": images}


class TestKeye(Keye):
    joined, name = False, "Keye"


class TestKeyeVL1_5(Keye):
    joined, name = True, "KeyeVL1_5"
