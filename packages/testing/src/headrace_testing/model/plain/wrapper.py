"""What plain readings of models that take images have in common: a language model of transformers', which
gets vectors of images in place of their tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class PlainWrapper(nn.Module):
    """Subclasses have the towers, and say what vectors an image is.

    Args:
        config: ``config.json``, and ``image_token``: the token that stands for a vector.
        language_model: of transformers'.
    """

    def __init__(self, config: Mapping[str, Any], language_model: Any) -> None:
        super().__init__()
        self.config, self.image = config, config["image_token"]
        self.language_model: Any = language_model
        self.generation_config = language_model.generation_config

    def embed(self, image: Mapping[str, Tensor]) -> Tensor:
        """[vectors, size] of an image, as the processor makes it."""
        raise NotImplementedError

    def published_name(self, name: str) -> str:
        """A tensor's name in the published files."""
        return name

    def stored(self) -> dict[str, Tensor]:
        """Tensors as the published files have them."""
        return {
            self.published_name(name): tensor.contiguous()
            for name, tensor in self.state_dict().items()
        }

    def embeds(self, input_ids: Tensor, images: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """[1, T, size]: of tokens, and of images in place of theirs."""
        made: Tensor = self.language_model.get_input_embeddings()(input_ids).clone()
        if images:
            made[input_ids == self.image] = torch.cat([self.embed(image) for image in images])
        return made

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        images: Sequence[Mapping[str, Tensor]] = (),
    ) -> Any:
        """An object with ``logits``."""
        given = self.embeds(input_ids, images)
        made = self.language_model(inputs_embeds=given, attention_mask=attention_mask)
        return SimpleNamespace(logits=made.logits)

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        images: Sequence[Mapping[str, Tensor]] = (),
        **settings: Any,
    ) -> Tensor:
        """[1, T + new tokens]."""
        made = self.language_model.generate(
            inputs_embeds=self.embeds(input_ids, images), attention_mask=attention_mask, **settings
        )
        return torch.cat((input_ids, made), dim=1)

    def save_pretrained(self, folder: Path) -> None:
        """Write tensors and config. Needs safetensors."""
        from safetensors.torch import save_file

        save_file(self.stored(), Path(folder) / "model.safetensors", metadata={"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(self.config))
