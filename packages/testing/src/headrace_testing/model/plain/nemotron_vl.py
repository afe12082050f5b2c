"""Plain readings of Llama 3.1 Nemotron Nano VL and Nemotron Nano V2 VL, which transformers does not have:
their tower (RADIO) and language models are transformers', what joins them is written by the names in the
published files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headrace_testing.model.plain.wrapper import PlainWrapper

_NAMES = (
    (r"^embeddings\.patch_projection", "model.patch_generator.embedder"),
    (r"^embeddings\.position_embedding", "model.patch_generator.pos_embed"),
    (r"^embeddings\.cls_register_token", "model.patch_generator.cls_token.token"),
    (r"^encoder\.layer\.", "model.blocks."),
    (r"\.attention\.o_proj\.", ".attn.proj."),
    (r"\.attention\.qkv\.", ".attn.qkv."),
)
"""transformers' names of a tower's tensors -> the published ones."""


class PlainNemotronVL(PlainWrapper):
    """
    Args:
        radio: settings of transformers' tower.
    """

    def __init__(self, config: Mapping[str, Any], radio: Mapping[str, Any]) -> None:
        from transformers.models.radio import RadioConfig, RadioModel

        super().__init__(config, self.of_text(config["llm_config"]))
        self.tower: Any = RadioModel(RadioConfig(**radio))
        unit, size = 4 * radio["hidden_size"], config["llm_config"]["hidden_size"]
        self.mlp1 = self.of_sizes(unit, config["projector_hidden_size"], size)

    def of_text(self, config: Mapping[str, Any]) -> Any:
        """The language model."""
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**config))

    def of_sizes(self, unit: int, between: int, size: int) -> nn.Sequential:
        """The projector."""
        return nn.Sequential(
            nn.LayerNorm(unit), nn.Linear(unit, between), nn.GELU(), nn.Linear(between, size)
        )

    def stored(self) -> dict[str, Tensor]:
        """Tensors as the published files have them: query, key and value as one, no scales of blocks."""
        self.without_scales()
        found = {}
        for name, tensor in self.state_dict().items():
            if not name.startswith("tower."):
                found[self.published_name(name)] = tensor
                continue
            if ".layer_scale" in name or ".k_proj." in name or ".v_proj." in name:
                continue
            if ".q_proj." in name:
                parts = [self.state_dict()[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
                name, tensor = name.replace("q_proj", "qkv"), torch.cat(parts)
            name = name.removeprefix("tower.")
            for pattern, instead in _NAMES:
                name = re.sub(pattern, instead, name)
            found[f"vision_model.radio_model.{name}"] = tensor
        return {name: tensor.contiguous() for name, tensor in found.items()}

    def without_scales(self) -> None:
        """Blocks of the published tower scale nothing."""
        for layer in self.tower.encoder.layer:
            for scale in (layer.layer_scale1, layer.layer_scale2):
                nn.init.ones_(scale.lambda1)

    def embed(self, image: Mapping[str, Tensor]) -> Tensor:
        self.without_scales()
        states = self.tower(image["pixel_values"]).features
        side = int(states.shape[1] ** 0.5)
        plane = states.view(len(states), side, side, -1)
        corners = [plane[:, y::2, x::2] for y in (0, 1) for x in (0, 1)]
        made: Tensor = self.mlp1(torch.cat(corners, dim=-1).flatten(0, 2))
        return made


class PlainNemotronVL2(PlainNemotronVL):
    """The tower takes images as they are: they come normalised."""

    def of_text(self, config: Mapping[str, Any]) -> Any:
        from transformers import NemotronHConfig, NemotronHForCausalLM

        return NemotronHForCausalLM(NemotronHConfig(**config))

    def of_sizes(self, unit: int, between: int, size: int) -> nn.Sequential:
        return nn.Sequential(
            nn.RMSNorm(unit, eps=1e-5),
            nn.Linear(unit, between, bias=False),
            SquaredReLU(),
            nn.Linear(between, size, bias=False),
        )

    def published_name(self, name: str) -> str:
        return name.replace("language_model.model.", "language_model.backbone.")

    def embed(self, image: Mapping[str, Tensor]) -> Tensor:
        conditioner = self.tower.input_conditioner
        pixels = image["pixel_values"] * conditioner.norm_std + conditioner.norm_mean
        return super().embed({"pixel_values": pixels})


class SquaredReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) ** 2
