"""Images of HyperCLOVA X Seed Vision 3B: LLaVA-NeXT's tiles on the mean's colour, of which the first is
all of the image in a square.

NAVER 2025, "HyperCLOVAX-SEED-Vision-Instruct-3B".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_multimodal.images.anyres import PINPOINTS, AnyresProcessor, Size, cut_off, on_canvas
from headrace_multimodal.images.clip import OneSize
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import part, token_id
from headrace_multimodal.images.steps import CLIP_MEAN, resized

_LISTED = "possible_resolutions"
_QUERIES = "num_queries_vis_abstractor_image"


class HCXVisionProcessor(AnyresProcessor):
    """``pixel_values`` are [1 + tiles, 3, height, width]."""

    text = "<|dummy3|>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        listed = config.get(_LISTED) or _canvases(config)
        super().__init__({**config, PINPOINTS: listed}, path)
        for key in ("anyres", "unpad"):
            if self.stated.get(key, True) is not True:
                raise UnsupportedModel(
                    f"image processor: {key} = {self.stated[key]!r}: must be true"
                )
        known = self.stated.get(_LISTED)
        if known and [list(size) for size in self.sizes] != known:
            raise UnsupportedModel(
                f"{_LISTED}: config.json and the image processor's settings differ"
            )
        queries = config.get(_QUERIES)
        if type(queries) is not int or queries < 1 or math.isqrt(queries) ** 2 != queries:
            raise UnsupportedModel(
                f"config.json: {_QUERIES} = {queries!r}: must be a square number"
            )
        self.side = math.isqrt(queries)
        self.background = tuple(int(x * 255) for x in self.stated.get("image_mean", CLIP_MEAN))
        self._squared = bool(self.stated.get("pad_to_square", True))

    def find_placeholder(self) -> int:
        return token_id(self.config, "image_token_id", "img_start_id")

    def tile_shape(self) -> OneSize:
        side = {"height": self.tile, "width": self.tile}
        return OneSize({**self.stated, "size": side, "do_center_crop": False}, self.tile)

    def whole(self, pixels: Pixels) -> Pixels:
        if not self._squared:
            return super().whole(pixels)
        height, width = pixels.shape[:2]
        longest = max(height, width)
        rows, columns = (math.ceil(side / longest * self.tile) for side in (height, width))
        small = resized(pixels, rows, columns, self.resample)
        return on_canvas(small, (self.tile, self.tile), self.background)

    @staticmethod
    def scaled(length: int, new: int, old: int) -> int:
        return cut_off(length, new, old)


def _canvases(config: Mapping[str, Any]) -> Sequence[Size]:
    """Of up to ``max_num_grids`` tiles."""
    most, tile = config.get("max_num_grids", 9), part(config, "vision_config").get("image_size")
    if type(most) is not int or type(tile) is not int or not 1 <= most <= 64:
        raise UnsupportedModel(
            f"config.json: max_num_grids = {most!r}, vision_config.image_size = {tile!r}: must be numbers, "
            f"the first at most 64, where {_LISTED} are left out"
        )
    alone = config.get("use_1x1_grid", False)
    numbers = range(1, most + 1)
    return [
        (rows * tile, columns * tile)
        for rows in numbers
        for columns in numbers
        if rows * columns <= most and (alone or rows * columns > 1)
    ]
