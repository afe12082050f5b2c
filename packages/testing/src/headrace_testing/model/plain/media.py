"""Plain readings of models that join a tower with a decoder of transformers and that no library has: a tower
makes vectors of images, which stand in the stream in place of a token."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

Image = Mapping[str, Tensor]


class PlainMedia(nn.Module):
    """
    Args:
        config: ``config.json``, and ``image_token``: the token that stands for a vector.
        text: the decoder, with its head.
        tower: the name of the tower's module, and the module; "": its parts have names of their own.
        embed: image -> vectors, by the tower.
        prefix: of the decoder's tensors in the checkpoint.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        text: Any,
        tower: tuple[str, nn.Module],
        embed: Callable[[Image], Tensor],
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.config, self.image, self.prefix = config, config["image_token"], prefix
        self.text = text
        self.name, module = tower
        self.tower, self.embed = module, embed

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, images: Sequence[Image] = ()
    ) -> Any:
        """An object with ``logits``."""
        self.place(input_ids[0], images)
        given: Tensor = self.text.get_input_embeddings()(input_ids).clone()
        if images:
            vectors = [self.embed(image) for image in images]
            given[input_ids == self.image] = torch.cat(vectors)
        return SimpleNamespace(
            logits=self.text(inputs_embeds=given, attention_mask=attention_mask).logits
        )

    def place(self, input_ids: Tensor, images: Sequence[Image]) -> None:
        """Told of a prompt [T] before it is computed, where tokens of images have places of their own."""

    def save_pretrained(self, folder: Path) -> None:
        """Write tensors and config. Needs safetensors."""
        from safetensors.torch import save_file

        own = {f"{self.prefix}{name}": t for name, t in self.text.state_dict().items()}
        before = f"{self.name}." if self.name else ""
        own |= {f"{before}{name}": t for name, t in self.tower.state_dict().items()}
        tensors = {name: tensor.contiguous() for name, tensor in own.items()}
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(self.config))
