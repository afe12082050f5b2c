"""BLIP-2's images: of one size, in front of the prompt.

Li et al. 2023, arXiv:2301.12597.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.clip import OneSize
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed, part
from headrace_multimodal.placeholders import expanded

_SIDE = 384
"""Where the settings say none."""
_MOST = 1 << 12


class Blip2Processor(ImageProcessor):
    """A prompt is a token for each query of each image, and the text with the token that begins it."""

    needs_media = True

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        shape = {"do_center_crop": False, "size": {"height": _SIDE, "width": _SIDE}}
        self._shape = OneSize({**shape, **self.stated}, _SIDE)
        side = part(config, "vision_config").get("image_size", 224)
        if self._shape.size != (side, side):
            raise UnsupportedModel(
                f"image processor: makes images of {self._shape.size}, and config.json says "
                f"vision_config.image_size = {side}"
            )
        self._number = config.get("num_query_tokens", 32)
        if type(self._number) is not int or not 0 < self._number <= _MOST:
            raise UnsupportedModel(
                f"config.json: num_query_tokens = {self._number!r}: must be a number from 1 to {_MOST}"
            )

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        return ProcessedMedia({PIXEL_VALUES: packed(self._shape(pixels))}, self._number)

    def sizeless(self, num_vectors: int) -> ProcessedMedia:
        """Any: all have as many vectors."""
        return self.blank(*self.largest_size())

    def largest_size(self) -> tuple[int, int]:
        return self._shape.size

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Images stand in front of all else, the token that begins a text included, wherever they are.

        Raises: RequestError: the prompt has marks of images, and not one for each.
        """
        marks = [token for token in token_ids if token == self.placeholder_id]
        others = [token for token in token_ids if token != self.placeholder_id]
        marks = marks or [self.placeholder_id] * len(media)
        return expanded([*marks, *others], media, self.placeholder_id)
