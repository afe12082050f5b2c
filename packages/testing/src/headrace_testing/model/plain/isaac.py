"""A plain reading of Isaac: transformers' SigLIP 2 layers over packed images, a projector, and Qwen 3 whose
tokens of images stand in time, height and width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace_testing.model.plain.wrapper import PlainWrapper


class PlainIsaac(PlainWrapper):
    """An image is ``pixel_values`` [patches, numbers] and ``image_grid_thw`` [3]."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        from transformers import (
            Qwen3Config,
            Qwen3ForCausalLM,
            Siglip2VisionConfig,
            Siglip2VisionModel,
        )

        text = {k: v for k, v in config.items() if k not in ("vision_config", "architectures")}
        text = {**text.pop("text_config", text), "model_type": "qwen3"}
        super().__init__(config, Qwen3ForCausalLM(Qwen3Config(**text)))
        self.language_model.model.rotary_emb = Rotation(text["head_dim"], text["rope_theta"])
        vision = config["vision_config"]
        self.factor = vision["pixel_shuffle_scale_factor"]
        own = {
            k: v for k, v in vision.items() if k not in ("model_type", "pixel_shuffle_scale_factor")
        }
        own |= {"vision_use_head": False, "attn_implementation": "sdpa"}
        self.tower: Any = Siglip2VisionModel(Siglip2VisionConfig(**own))
        unit = vision["hidden_size"] * self.factor**2
        self.up = nn.Linear(unit, 4 * unit, bias=False)
        self.down = nn.Linear(4 * unit, text["hidden_size"], bias=False)

    def embed(self, image: Mapping[str, Tensor]) -> Tensor:
        _, rows, columns = image["image_grid_thw"].tolist()
        number, factor = rows * columns, self.factor
        states = self.tower(
            image["pixel_values"][None],
            pixel_attention_mask=torch.ones(1, number),
            spatial_shapes=torch.tensor([[rows, columns]]),
        ).last_hidden_state[0]
        units = [
            states.view(rows, columns, -1)[y : y + factor, x : x + factor].flatten()
            for y in range(0, rows, factor)
            for x in range(0, columns, factor)
        ]
        made: Tensor = self.down(functional.silu(self.up(torch.stack(units))))
        return made

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        images: Sequence[Mapping[str, Tensor]] = (),
    ) -> Any:
        embeds = self.embeds(input_ids, images)
        return SimpleNamespace(logits=self._run(embeds, self.places(input_ids, images)))

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        images: Sequence[Mapping[str, Tensor]] = (),
        **settings: Any,
    ) -> Tensor:
        """[1, T + new tokens], the likeliest, each computed with all before it."""
        embeds, places = self.embeds(input_ids, images), self.places(input_ids, images)
        last = places.max()
        for step in range(settings["max_new_tokens"]):
            chosen = self._run(embeds, places)[:, -1:].argmax(-1)
            input_ids = torch.cat((input_ids, chosen), dim=1)
            new = self.language_model.get_input_embeddings()(chosen)
            embeds = torch.cat((embeds, new), dim=1)
            places = torch.cat((places, (last + 1 + step).expand(3, 1)), dim=1)
        return input_ids

    def places(self, input_ids: Tensor, images: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """[3, T]: time goes on by one for a token of text, and for an image."""
        found: list[list[int]] = []
        time, waiting, at = 0, list(images), 0
        tokens = input_ids[0].tolist()
        while at < len(tokens):
            if tokens[at] == self.image and waiting:
                _, rows, columns = waiting.pop(0)["image_grid_thw"].tolist()
                box = rows // self.factor, columns // self.factor
                found += [[time, y, x] for y in range(box[0]) for x in range(box[1])]
                at += box[0] * box[1]
            else:
                found.append([time] * 3)
                at += 1
            time += 1
        return torch.tensor(found).T

    def _run(self, embeds: Tensor, places: Tensor) -> Tensor:
        self.language_model.model.rotary_emb.places = places
        made: Tensor = self.language_model(inputs_embeds=embeds, use_cache=False).logits
        return made

    def stored(self) -> dict[str, Tensor]:
        tower = "model.vision_embedding.0"
        own = {
            f"{tower}.{name.removeprefix('vision_model.')}": tensor
            for name, tensor in self.tower.state_dict().items()
        }
        return {
            **self.language_model.state_dict(),
            **own,
            "model.vision_embedding.1.weight": self.up.weight,
            "model.vision_embedding.3.weight": self.down.weight,
        }


class Rotation(nn.Module):
    """Half of the frequencies turn by time, then a quarter each by height and by width."""

    places: Tensor

    def __init__(self, size: int, theta: float) -> None:
        super().__init__()
        self.frequencies = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
        self.axes = torch.tensor([0] * (size // 4) + [1] * (size // 8) + [2] * (size // 8))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (self.places[self.axes].T.float() * self.frequencies).repeat(1, 2)[None]
        return angles.cos(), angles.sin()
