"""Molmo 2 of transformers, which takes images as headrace's processor makes them and saves its files as they
are published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def published_molmo2() -> type[Any]:
    """The class, under its own name."""
    import transformers

    whole: Any = transformers.Molmo2ForConditionalGeneration

    class Molmo2ForConditionalGeneration(whole):  # type: ignore[misc]
        marks: Sequence[int] = ()
        """Tokens of pictures; empty: those of vectors alone."""

        def save_pretrained(self, folder: Path, **options: Any) -> None:
            """The table of tokens is cut behind the answers: transformers cuts it in halves."""
            super().save_pretrained(folder, **options)
            file, answers = Path(folder) / "model.safetensors", self.config.text_config.vocab_size
            tensors = load_file(file)
            names = [f"model.transformer.wte.{of}embedding" for of in ("", "new_")]
            table = torch.cat([tensors[name] for name in names])
            cut = table[:answers].clone(), table[answers:].clone()
            tensors |= dict(zip(names, cut, strict=True))
            save_file(tensors, file, metadata={"format": "pt"})

        def generate(
            self, *, input_ids: Tensor, images: Sequence[Mapping[str, Tensor]] = (), **options: Any
        ) -> Any:
            marks = torch.tensor([*self.marks, self.config.image_patch_id])
            if images:
                options |= of_images(images)
                options["mm_token_type_ids"] = torch.isin(input_ids, marks).int()
            return super().generate(input_ids=input_ids, **options)

    Molmo2ForConditionalGeneration.__qualname__ = "Molmo2ForConditionalGeneration"
    return Molmo2ForConditionalGeneration


def of_images(images: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Images of headrace's processor as that library's ``forward`` takes them: places count through all."""
    first, squares = 0, []
    for image in images:
        own = image["squares"]
        squares.append(torch.where(own < 0, -1, own + first))
        first += image["pixel_values"].shape[:2].numel()
    return {
        "pixel_values": torch.cat([image["pixel_values"] for image in images]),
        "image_token_pooling": torch.cat(squares),
        "image_grids": torch.tensor([[1, len(image["squares"]), 0, 0] for image in images]),
    }
