"""GLM-4V 9B's image: of one size, between a token that begins it and one that ends it.

GLM Team 2024, arXiv:2406.12793.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import (
    PIXEL_VALUES,
    ImageProcessor,
    packed,
    part,
    token_id,
)
from headrace_multimodal.images.steps import BICUBIC, Numbers, resized
from headrace_multimodal.images.vocabulary import special_token_id
from headrace_multimodal.placeholders import expanded

_PAD = "<|endoftext|>"


class Glm4V9BProcessor(ImageProcessor):
    """``pixel_values`` are [3, side, side]. The tokenizer's code says how they are made; no settings do."""

    text = f"<|begin_of_image|>{_PAD}<|end_of_image|>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        vision = part(config, "vision_config")
        side, patch = vision.get("image_size", 1120), vision.get("patch_size", 14)
        if not all(type(size) is int and size > 0 for size in (side, patch)):
            raise UnsupportedModel(
                f"config.json: vision_config.image_size = {side!r} in patches of {patch!r}: must be sizes"
            )
        self._side, number = side, (side // patch // 2) ** 2
        self._pad = special_token_id(path, _PAD)
        self._end = token_id(config, "eoi_token_id")
        self._ids = (self.placeholder_id, *[self._pad] * number, self._end)
        self._numbers = Numbers()

    def find_placeholder(self) -> int:
        """The token that begins an image."""
        return token_id(self.config, "boi_token_id")

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """The token that begins an image, and that of its place."""
        return (self.placeholder_id, self._pad)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        values = self._numbers(resized(pixels, self._side, self._side, BICUBIC))
        count = len(self._ids)
        return ProcessedMedia({PIXEL_VALUES: packed(values)}, count, self._ids, ((0, count),))

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Three tokens stand for the image.

        Raises: RequestError: there is more than one image, or its mark is not whole.
        """
        if len(media) > 1:
            raise RequestError(
                f"the prompt comes with {len(media)} images: this model takes one",
                param="multi_modal_data",
            )
        if not media:
            return expanded(token_ids, media, self.placeholder_id)
        mark = [self.placeholder_id, self._pad, self._end]
        kept: list[int] = []
        for token in token_ids:
            kept.append(token)
            if kept[-3:] == mark:
                del kept[-2:]
        whole = len(token_ids) - len(kept) == 2 and self._end not in kept
        if self.placeholder_id in kept and not whole:
            raise RequestError(
                f"the image's mark in the prompt must be {self.text}, once",
                param="multi_modal_data",
            )
        return expanded(kept, media, self.placeholder_id)

    def sizeless(self, num_vectors: int) -> ProcessedMedia:
        """Any: all have as many vectors."""
        return self.blank(self._side, self._side)

    def largest_size(self) -> tuple[int, int]:
        return self._side, self._side
