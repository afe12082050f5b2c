"""Plain readings of Tarsier and MiniMax-VL-01, LLaVA's and LLaVA-NeXT's kin: their towers and language models
are transformers', what joins them is written as the published code reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headrace_testing.model.plain.wrapper import PlainWrapper

ENDS = ("image_newline_idx", "image_new_idx")
"""Keys of the tokens behind a row of patches, and behind the last row."""


class Projected(PlainWrapper):
    """A tower of transformers', and LLaVA's projector."""

    layer: ClassVar[int]

    def __init__(self, config: Mapping[str, Any]) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, CLIPVisionConfig, CLIPVisionModel

        text = AutoConfig.for_model(**config["text_config"])
        maker: Any = AutoModelForCausalLM
        super().__init__(config, maker.from_config(text))
        self.vision_tower: Any = CLIPVisionModel(CLIPVisionConfig(**config["vision_config"]))
        size = config["text_config"]["hidden_size"]
        self.projector = nn.ModuleDict(
            {
                "linear_1": nn.Linear(config["vision_config"]["hidden_size"], size),
                "linear_2": nn.Linear(size, size),
            }
        )

    def published_name(self, name: str) -> str:
        if name.startswith("vision_tower.") and ".vision_model." not in name:
            name = name.replace("vision_tower.", "vision_tower.vision_model.", 1)
        return name.replace("projector.", "multi_modal_projector.", 1)

    def projected(self, pixels: Tensor) -> Tensor:
        """[I, patches, size]."""
        states = self.vision_tower(pixels, output_hidden_states=True).hidden_states[self.layer]
        wide = nn.functional.gelu(self.projector["linear_1"](states[:, 1:]))
        made: Tensor = self.projector["linear_2"](wide)
        return made


class PlainTarsier(Projected):
    """All of an image stands in one run, ends of rows among it, as the published code joins them."""

    layer = -2

    def embed(self, image: Mapping[str, Tensor]) -> Tensor:
        table = self.language_model.get_input_embeddings()
        newline, end = (table(torch.tensor([self.config[key]])) for key in ENDS)
        vectors = self.projected(image["pixel_values"][None])[0]
        side = int(len(vectors) ** 0.5)
        rows = [torch.cat((row, newline)) for row in vectors.view(side, side, -1)]
        return torch.cat((*rows, end))

    def embeds(self, input_ids: Tensor, images: Sequence[Mapping[str, Tensor]]) -> Tensor:
        if not images:
            return super().embeds(input_ids, images)
        ends = torch.isin(input_ids, torch.tensor([self.config[key] for key in ENDS]))
        return super().embeds(input_ids.masked_fill(ends, self.image), images)


class PlainMiniMaxVL01(Projected):
    """An image in small, and rows of its tiles without margins, each with its end."""

    layer = -1

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.image_newline = nn.Parameter(torch.zeros(config["text_config"]["hidden_size"]))

    def embed(self, image: Mapping[str, Tensor]) -> Tensor:
        states = self.projected(image["pixel_values"])
        side, tile = int(states.shape[1] ** 0.5), image["pixel_values"].shape[-1]
        whole, *tiles = states.view(len(states), side, side, -1)
        height, width = image["image_sizes"].tolist()
        rows, columns = (length // tile for length in self.canvas(height, width))
        lines = [
            torch.cat(tiles[row * columns : (row + 1) * columns], dim=1) for row in range(rows)
        ]
        plane = torch.cat(lines)
        rows, columns = plane.shape[:2]
        if width / height > columns / rows:
            margin = (rows - height * columns // width) // 2
            plane = plane[margin : rows - margin]
        else:
            margin = (columns - width * rows // height) // 2
            plane = plane[:, margin : columns - margin]
        ended = [torch.cat((row, self.image_newline[None])) for row in plane]
        return torch.cat((whole.flatten(0, 1), *ended))

    def canvas(self, height: int, width: int) -> Sequence[int]:
        """The first of those that keep most pixels, and of these waste least."""
        sizes: Sequence[Sequence[int]] = self.config["image_grid_pinpoints"]
        found, best = sizes[0], (0, 0)
        for size in sizes:
            scale = min(size[1] / width, size[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            worth = kept, kept - size[0] * size[1]
            if worth > best:
                found, best = size, worth
        return found
