"""Tarsier's images: stretched to squares, as LLaVA's, with a token behind each row of patches and another
behind the last one.

Wang et al. 2024, arXiv:2407.00634.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images.clip import LlavaProcessor
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, packed, token_id
from headrace_multimodal.images.steps import BICUBIC, resized

_IDS: Mapping[str, int] = {
    "image_token_index": 32_000, "image_newline_idx": 32_002, "image_new_idx": 32_003,
}  # fmt: skip
"""Of configs that leave them out."""
_MOST_PIXELS = 1 << 26
"""Of the square that an image is stretched to, unless the image itself is larger."""


class TarsierProcessor(LlavaProcessor):
    """``pixel_values`` are [3, height, width]. The ends of rows and of the image are tokens of text: the
    published model takes their vectors from the same table."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        config = {**_IDS, **config}
        super().__init__(config, path)
        height, width = self._shape.size
        self._side = height // self._patch
        if height != width or self._num_tokens != self._side**2:
            raise UnsupportedModel(
                f"config.json: images of {height} x {width} pixels with {self._num_tokens} states: must be "
                "squares with one state for each patch (vision_feature_select_strategy)"
            )
        row = (*[self.placeholder_id] * self._side, token_id(config, "image_newline_idx"))
        self._tokens = (*row * self._side, token_id(config, "image_new_idx"))
        self._runs = tuple((index * len(row), self._side) for index in range(self._side))

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: the image is so narrow that its square is very large."""
        height, width = pixels.shape[:2]
        side = max(height, width)
        if side**2 > max(_MOST_PIXELS, height * width):
            raise RequestError(
                f"image of {width} x {height} pixels: this model makes a square of it, of at most "
                f"{_MOST_PIXELS} pixels: must be smaller",
                param="multi_modal_data",
            )
        square = resized(pixels, side, side, BICUBIC)
        inputs = {PIXEL_VALUES: packed(self._shape(square))}
        return ProcessedMedia(inputs, len(self._tokens), self._tokens, self._runs)
