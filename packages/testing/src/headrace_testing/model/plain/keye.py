"""A plain reading of Keye-VL and Keye-VL 1.5: the tower is PaddleOCR-VL's in transformers, the decoder Qwen
3's with another rotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace_testing.model.plain.media import Image, PlainMedia

SECONDS = "second_per_grid_ts"
"""Of a video's frame; images have none."""


class Turning(nn.Module):
    """Rotation by time, height and width, each for a third of the frequencies; Args: half: of them."""

    places: Tensor

    def __init__(self, half: int) -> None:
        super().__init__()
        self.number = half

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        turning = 10000.0 ** -(torch.arange(self.number) / self.number)
        angles = self.places[torch.arange(self.number) * 3 // self.number].T * turning
        both = torch.cat([angles, angles], dim=-1)[None]
        return both.cos(), both.sin()


class Projector(nn.Module):
    """Args: joined: the norm is of four states together."""

    def __init__(self, size: int, out_size: int, *, joined: bool) -> None:
        super().__init__()
        self.pre_norm = nn.LayerNorm(4 * size if joined else size, eps=1e-5)
        self.linear_1, self.linear_2 = nn.Linear(4 * size, 4 * size), nn.Linear(4 * size, out_size)
        self.joined = joined

    def forward(self, squares: Tensor) -> Tensor:
        """squares [squares, 4, size]."""
        x = self.pre_norm(squares.flatten(1) if self.joined else squares).flatten(1)
        made: Tensor = self.linear_2(nn.functional.gelu(self.linear_1(x)))
        return made


class PlainKeye(PlainMedia):
    """
    Args:
        config: ``config.json``, and ``image_token``, which stands for a vector of an image or a video.
        text: the decoder's part of it.
        joined: the projector's norm is of four states together.
    """

    def __init__(self, config: dict[str, Any], text: dict[str, Any], *, joined: bool) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM
        from transformers.models.paddleocr_vl.configuration_paddleocr_vl import (
            PaddleOCRVisionConfig,
        )
        from transformers.models.paddleocr_vl.modeling_paddleocr_vl import PaddleOCRVisionModel

        vision = config["vision_config"]
        patch, size = vision["patch_size"], vision["hidden_size"]
        decoder = Qwen3ForCausalLM(Qwen3Config(**text, tie_word_embeddings=False))
        turning = Turning(text["head_dim"] // 2)
        decoder.model.rotary_emb = turning
        parts: Any = nn.Module()
        parts.visual = PaddleOCRVisionModel(PaddleOCRVisionConfig(**vision))
        parts.mlp_AR = Projector(size, text["hidden_size"], joined=joined)
        whole: Any = parts.visual.vision_model
        whole.head = nn.LayerNorm(size)  # files have both, and images of any size need neither
        whole.embeddings.packing_position_embedding = nn.Embedding(8, size)

        def embed(image: Image) -> Tensor:
            time, height, width = image["image_grid_thw"].tolist()
            squares = (time, height // 2, width // 2, 2, 2)
            rows = image["pixel_values"].view(*squares, -1).transpose(2, 3).flatten(0, 4)
            number = len(rows)  # all see each other, where the library's code has frames apart
            states = parts.visual(
                rows.view(1, -1, 3, patch, patch),
                grid_thw=image["image_grid_thw"][None],
                cu_seqlens=torch.tensor([0, number], dtype=torch.int32),
                max_seqlen=number,
            ).last_hidden_state
            cut = states.view(time, height // 2, 2, width // 2, 2, size).transpose(2, 3)
            made: Tensor = parts.mlp_AR(cut.reshape(-1, 4, size))
            return made

        super().__init__(config, decoder, ("", parts), embed)
        self.turning = turning

    def place(self, input_ids: Tensor, images: Sequence[Image]) -> None:
        """Text counts on; an image's tokens stand in a box, and text goes on behind its longest side."""
        found: list[tuple[int, int, int]] = []
        begin, at = 0, 0
        grids = [
            (*image["image_grid_thw"].tolist(), float(image.get(SECONDS, 0))) for image in images
        ]
        while at < len(input_ids):
            if input_ids[at] != self.image:
                found.append((begin, begin, begin))
                at, begin = at + 1, begin + 1
                continue
            time, height, width, seconds = grids.pop(0)
            box = [
                (begin + int(t * seconds * 2), begin + y, begin + x)
                for t in range(time)
                for y in range(height // 2)
                for x in range(width // 2)
            ]
            found += box
            at, begin = at + len(box), max(max(place) for place in box) + 1
        self.turning.places = torch.tensor(found, dtype=torch.float32).T
