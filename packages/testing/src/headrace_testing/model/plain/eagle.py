"""A plain reading of Eagle 2.5, which transformers does not have: its tower (SigLIP) and its language model
are transformers', what joins them is written by the names in the published files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headrace_testing.model.plain.wrapper import PlainWrapper


class PlainEagle(PlainWrapper):
    """Config: ``select_layer`` is stated."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        from transformers import (
            Qwen2Config,
            Qwen2ForCausalLM,
            SiglipVisionConfig,
            SiglipVisionModel,
        )

        super().__init__(config, Qwen2ForCausalLM(Qwen2Config(**config["text_config"])))
        self.vision_model: Any = SiglipVisionModel(SiglipVisionConfig(**config["vision_config"]))
        unit = 4 * config["vision_config"]["hidden_size"]
        size = config["text_config"]["hidden_size"]
        self.mlp1 = nn.Sequential(
            nn.LayerNorm(unit), nn.Linear(unit, size), nn.GELU(), nn.Linear(size, size)
        )

    def published_name(self, name: str) -> str:
        """A tower lies one module deeper than transformers writes it since 5."""
        own = "vision_model."
        return own + name if name.startswith(own) else name

    def embed(self, image: Mapping[str, Tensor]) -> Tensor:
        layer = self.config["select_layer"]
        made = self.vision_model(image["pixel_values"], output_hidden_states=True)
        states = made.last_hidden_state if layer == -1 else made.hidden_states[layer]
        side = int(states.shape[1] ** 0.5)
        plane = states.view(len(states), side, side, -1)
        corners = [plane[:, y::2, x::2] for y in (0, 1) for x in (0, 1)]
        vectors: Tensor = self.mlp1(torch.cat(corners, dim=-1).flatten(0, 2))
        return vectors
