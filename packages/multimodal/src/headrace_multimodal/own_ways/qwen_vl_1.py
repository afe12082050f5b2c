"""Qwen-VL's images: of one size, between a token that begins them and one that ends them.

Bai et al. 2023, arXiv:2308.12966.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import (
    PIXEL_VALUES,
    ImageProcessor,
    packed,
    part,
    token_id,
)
from headrace_multimodal.images.steps import BICUBIC, Numbers, resized
from headrace_multimodal.placeholders import expanded


class QwenVL1Processor(ImageProcessor):
    """``pixel_values`` are [3, side, side]. The model's code says how they are made; no settings do."""

    text = "<img></img>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        visual = part(config, "visual")
        side, number = visual.get("image_size", 448), visual.get("n_queries", 256)
        if not all(type(size) is int and 0 < size <= 1 << 14 for size in (side, number)):
            raise UnsupportedModel(
                f"config.json: visual.image_size = {side!r}, n_queries = {number!r}: must be sizes"
            )
        self._side, self._number = side, number
        begin = self.placeholder_id
        self._end = begin + 1
        self._ids = (begin, *[begin + 2] * number, self._end)
        self._numbers = Numbers()

    def find_placeholder(self) -> int:
        """The token that begins an image."""
        return token_id(part(self.config, "visual"), "image_start_id")

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """The token that begins an image, and that of a vector."""
        return (self.placeholder_id, self._ids[1])

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        values = self._numbers(resized(pixels, self._side, self._side, BICUBIC))
        inputs = {PIXEL_VALUES: packed(values)}
        return ProcessedMedia(inputs, len(self._ids), self._ids, ((1, self._number),))

    def placeholder(self, modality: Modality, index: int) -> str:
        """Images are counted."""
        return f"Picture {index + 1}: {self.text}\n"

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """What stands between the two tokens, such as an image's path, is not read.

        Raises: RequestError: an image does not end, or there is not one for each of the media.
        """
        kept: list[int] = []
        waiting: list[int] = []
        for token in token_ids:
            if token == self._end and waiting:
                kept.append(waiting[0])
                waiting = []
            elif token == self.placeholder_id or waiting:
                waiting.append(token)
            else:
                kept.append(token)
        if waiting:
            raise RequestError(
                f"an image in the prompt must be {self.text}: it does not end",
                param="multi_modal_data",
            )
        return expanded(kept, media, self.placeholder_id)

    def sizeless(self, num_vectors: int) -> ProcessedMedia:
        """Any: all have as many vectors."""
        return self.blank(self._side, self._side)

    def largest_size(self) -> tuple[int, int]:
        return self._side, self._side
