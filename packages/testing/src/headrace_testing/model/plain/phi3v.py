"""A plain reading of Phi-3-vision, which transformers does not have: its tower and its language model are
transformers', what joins them is written by the report (arXiv:2404.14219) and the names in the published
files, vector by vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headrace_testing.model.plain.wrapper import PlainWrapper

_OF_THE_WHOLE = ("architectures", "model_type")


class PlainPhi3V(PlainWrapper):
    """See the module."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        from transformers import CLIPVisionConfig, CLIPVisionModel, Phi3Config, Phi3ForCausalLM

        known = Phi3Config().to_dict()
        own = {k: v for k, v in config.items() if k in known and k not in _OF_THE_WHOLE}
        stated = dict(config["rope_scaling"], rope_theta=config["rope_theta"], rope_type="longrope")
        stated.pop("type")
        super().__init__(config, Phi3ForCausalLM(Phi3Config(**own, rope_parameters=stated)))
        tower = {
            k: v for k, v in config["img_processor"].items() if k not in ("name", "model_type")
        }
        self.img_processor: Any = CLIPVisionModel(CLIPVisionConfig(**tower))
        unit, size = tower["hidden_size"] * 4, config["hidden_size"]
        self.glb_GN = nn.Parameter(torch.zeros(1, 1, unit))
        self.sub_GN = nn.Parameter(torch.zeros(1, 1, 1, unit))
        self.img_projection = nn.Sequential(nn.Linear(unit, size), nn.GELU(), nn.Linear(size, size))

    def published_name(self, name: str) -> str:
        if name.startswith("language_model."):
            return name.removeprefix("language_model.")
        if name.startswith("img_processor.") and ".vision_model." not in name:
            name = name.replace("img_processor.", "img_processor.vision_model.", 1)
        return f"model.vision_embed_tokens.{name}"

    def embed(self, image: Mapping[str, Tensor]) -> Tensor:
        rows, columns = image["image_grid"].tolist()
        made = self.img_processor(image["pixel_values"], output_hidden_states=True)
        states = made.hidden_states[-2][:, 1:]
        side = int(states.shape[1] ** 0.5)
        planes = states.view(len(states), side, side, -1)
        whole = self.lines([[planes[0]]])
        tiles = [
            [planes[1 + row * columns + column] for column in range(columns)] for row in range(rows)
        ]
        canvas = self.lines(tiles)
        parts = [canvas, self.glb_GN[0], whole]
        if self.config["embd_layer"]["hd_transform_order"] == "glb_sub":
            parts.reverse()
        projected: Tensor = self.img_projection(torch.cat(parts))
        return projected

    def lines(self, tiles: list[list[Tensor]]) -> Tensor:
        """Rows of vectors of four patches each, with an end behind each row.

        Args:
            tiles: [side, side, H] in rows of tiles.
        """
        plane = torch.cat([torch.cat(row, dim=1) for row in tiles])
        found = []
        for y in range(0, plane.shape[0], 2):
            for x in range(0, plane.shape[1], 2):
                corners = plane[y, x], plane[y, x + 1], plane[y + 1, x], plane[y + 1, x + 1]
                found.append(torch.cat(corners))
            found.append(self.sub_GN[0, 0, 0])
        return torch.stack(found)
