"""Pixtral's images for Mistral's own files, as Mistral's mistral-common makes them.

Agrawal et al. 2024, arXiv:2410.07073.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.pixtral import in_rows, model_unit
from headrace_multimodal.images.processor import (
    PIXEL_VALUES,
    ImageProcessor,
    packed,
    part,
    token_id,
)
from headrace_multimodal.images.steps import CLIP_MEAN, CLIP_STD, Float
from headrace_multimodal.own_ways.cubic import cubic


class MistralsPixtralProcessor(ImageProcessor):
    """``pixel_values`` are [3, height, width]. Sizes and tokens are those of ``params.json``; a file of
    settings beside it, which is for transformers' classes, is not looked at."""

    text = "[IMG]"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        merge = config.get("spatial_merge_size")
        self._unit = model_unit({**config, "spatial_merge_size": 1 if merge is None else merge}, 1)
        side = part(config, "vision_config").get("image_size")
        if type(side) is not int or not 0 < side <= 1 << 14:
            raise UnsupportedModel(
                f"params.json: vision_encoder.max_image_size = {side!r}: must be a size"
            )
        self._side = side
        self._break = token_id(config, "image_break_token_id")
        self._end = token_id(config, "image_end_token_id")

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        rows, columns = self.grid(*pixels.shape[:2])
        values = _normed(cubic(pixels, rows * self._unit, columns * self._unit))
        tokens, runs = in_rows(rows, columns, (self.placeholder_id, self._break, self._end))
        return ProcessedMedia({PIXEL_VALUES: packed(values)}, len(tokens), tokens, runs)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of vectors that an image of some size becomes."""
        ratio = max(height, width) / self._side
        if ratio > 1:
            height, width = round(height / ratio), round(width / ratio)
        # mistral-common makes nothing of an image that is shrunk to no width.
        rows, columns = ((max(1, side) - 1) // self._unit + 1 for side in (height, width))
        return rows, columns

    def largest_size(self) -> tuple[int, int]:
        return self._side, self._side


def _normed(x: Float) -> Float:
    """[H, W, 3] -> [3, H, W] float32."""
    mean, std = np.array(CLIP_MEAN), np.array(CLIP_STD)
    return np.ascontiguousarray(((x / 255.0 - mean) / std).transpose(2, 0, 1), np.float32)
