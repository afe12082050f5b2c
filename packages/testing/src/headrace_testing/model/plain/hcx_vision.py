"""A plain reading of HyperCLOVA X Seed Vision 3B, which transformers does not have: its tower is that
library's SigLIP, its projector and its rows are written by the published code, in front of Llama."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace_testing.model.plain.kanana_v import Stage
from headrace_testing.model.plain.wrapper import PlainWrapper


class PlainHCXVision(PlainWrapper):
    """See the module."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        from transformers import (
            LlamaConfig,
            LlamaForCausalLM,
            SiglipVisionConfig,
            SiglipVisionModel,
        )

        text = {k: v for k, v in config["text_config"].items() if k != "model_type"}
        super().__init__(config, LlamaForCausalLM(LlamaConfig(**text)))
        self.vision_model: Any = SiglipVisionModel(SiglipVisionConfig(**config["vision_config"]))
        size, out = config["vision_config"]["hidden_size"], text["hidden_size"]
        self.places = config["vision_config"]["image_size"] // config["vision_config"]["patch_size"]
        self.tile = config["vision_config"]["image_size"]
        self.side = int(config["num_queries_vis_abstractor_image"] ** 0.5)
        self.mm_projector: Any = nn.Module()
        self.mm_projector.pos_emb = nn.Parameter(torch.zeros(1, self.places**2, size))
        pool = nn.AdaptiveAvgPool2d((self.side, self.side))
        self.mm_projector.net = nn.Sequential(Stage(3, size, size), pool, Stage(3, size, size))
        self.mm_projector.readout = nn.Sequential(
            nn.Linear(size, out), nn.SiLU(), nn.Linear(out, out)
        )
        self.image_newline = nn.Parameter(torch.zeros(out))

    def published_name(self, name: str) -> str:
        if name.startswith("vision_model.") and ".vision_model." not in name:
            return name.replace("vision_model.", "vision_model.vision_model.", 1)
        return name

    def projected(self, pixels: Tensor) -> Tensor:
        """[tiles, side, side, out]."""
        made = self.vision_model(pixels, output_hidden_states=True)
        x = made.hidden_states[self.config["use_nth_layer"]] + self.mm_projector.pos_emb
        x = x.view(len(x), self.places, self.places, -1).permute(0, 3, 1, 2)
        found: Tensor = self.mm_projector.readout(self.mm_projector.net(x).permute(0, 2, 3, 1))
        return found

    def embed(self, image: Mapping[str, Tensor]) -> Tensor:
        whole, *tiles = self.projected(image["pixel_values"])
        height, width = image["image_sizes"].tolist()
        rows, columns = (length // self.tile for length in self.canvas(height, width))
        lines = [
            torch.cat(tiles[row * columns : (row + 1) * columns], dim=1) for row in range(rows)
        ]
        plane = torch.cat(lines)
        rows, columns = plane.shape[:2]
        if width / height > columns / rows:
            margin = (rows - int(height * (columns / width))) // 2
            plane = plane[margin : rows - margin]
        else:
            margin = (columns - int(width * (rows / height))) // 2
            plane = plane[:, margin : columns - margin]
        ended = [torch.cat((row, self.image_newline[None])) for row in plane]
        return torch.cat((whole.flatten(0, 1), *ended))

    def canvas(self, height: int, width: int) -> Sequence[int]:
        """The first of those that keep most pixels, and of these waste least."""
        sizes: Sequence[Sequence[int]] = self.config["possible_resolutions"]

        def worth(size: Sequence[int]) -> tuple[int, int]:
            scale = min(size[1] / width, size[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - size[0] * size[1]

        return max(sizes, key=worth)
