"""Images of Phi-4-multimodal: in tiles, as many as the image is large, with white to the right or below, and
the whole in one tile.

Abouelenin et al. 2025, arXiv:2503.01743, section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import Modality, ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed, part
from headrace_multimodal.images.steps import BILINEAR, HALVES, Numbers, resized, two_sizes
from headrace_multimodal.tiles.reduced import reduced

CROPS, GRID, PATCHES = "dynamic_hd", "image_grid", "image_patches"
_SIDE, _PATCH, _CROPS = 448, 14, 36
"""Where settings leave them out."""
_MOST_CROPS = 1 << 8
_LEAST = 10
"""Pixels of a side, behind resizing."""
_IMAGE_TOKEN = 200010


class Phi4Images(ImageProcessor):
    """See the module. ``pixel_values`` are [1 + tiles, 3, side, side], the whole first; ``image_grid`` [2]
    int64 rows and columns of tiles, ``image_patches`` [2] those of patches that are of the image."""

    text = "<|image_1|>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        tower = part(config, "vision_config")
        side = {"height": _SIDE, "width": _SIDE}
        size = two_sizes(self.stated.get("size", side), "size")
        self._side = tower.get("image_size", _SIDE)
        self._patch = self.stated.get("patch_size", _PATCH)
        if size != (self._side, self._side) or self._patch != tower.get("patch_size", _PATCH):
            raise UnsupportedModel(
                f"image processor: size = {size}, patch_size = {self._patch!r}: the tower takes tiles of "
                f"{self._side} pixels in patches of {tower.get('patch_size', _PATCH)}"
            )
        self._crops = self.stated.get(CROPS, _CROPS)
        if type(self._crops) is not int or not 0 < self._crops <= _MOST_CROPS:
            raise UnsupportedModel(
                f"image processor: {CROPS} = {self._crops!r}: must be a number from 1 to {_MOST_CROPS}"
            )
        self._numbers = Numbers.of(self.stated, HALVES, HALVES)

    def find_placeholder(self) -> int:
        """The token of a vector; published configs do not say it."""
        stated = part(self.config, "vision_config").get("image_token_id", _IMAGE_TOKEN)
        if type(stated) is not int or stated < 0:
            raise UnsupportedModel(
                f"config.json: vision_config.image_token_id = {stated!r}: must be a token id"
            )
        return stated

    def placeholder(self, modality: Modality, index: int) -> str:
        return f"<|image_{index + 1}|>"

    def options(self) -> Sequence[str]:
        return (CROPS,)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: the image is too narrow, or the option is no number of tiles."""
        most = options.get(CROPS, self._crops)
        if type(most) is not int or not 0 < most <= self._crops:
            raise RequestError(
                f"mm_processor_kwargs.{CROPS} = {most!r}: must be a number of tiles from 1 to {self._crops}",
                param="mm_processor_kwargs",
            )
        side = self._side
        rows, columns = grid_of(pixels.shape[0], pixels.shape[1], side, most)
        height, width = _fitted(pixels, rows * side, columns * side)
        canvas = np.full((rows * side, columns * side, 3), 255, np.uint8)
        canvas[:height, :width] = resized(pixels, height, width, BILINEAR)
        numbers = self._numbers(canvas)
        blocks = numbers.reshape(3, rows, side, columns, side)
        tiles = blocks.transpose(1, 3, 0, 2, 4).reshape(-1, 3, side, side)
        kept = [
            (total // self._patch) - (total - own) // self._patch
            for total, own in ((rows * side, height), (columns * side, width))
        ]
        inputs = {
            PIXEL_VALUES: packed(np.concatenate([reduced(numbers, rows, columns)[None], tiles])),
            GRID: packed(np.array((rows, columns), np.int64)),
            PATCHES: packed(np.array(kept, np.int64)),
        }
        return ProcessedMedia(inputs, self._num_tokens(*kept))

    def _num_tokens(self, height: int, width: int) -> int:
        """Two by two patches are a vector, in each tile; a row ends with another."""
        side = self._side // self._patch
        rows, columns = (
            sum(-(-min(side, size - first) // 2) for first in range(0, size, side))
            for size in (height, width)
        )
        whole = side // 2
        number: int = rows * (columns + 1) + 1 + whole * (whole + 1)
        return number

    def sizeless(self, num_vectors: int) -> ProcessedMedia:
        """As many tokens as vectors: an image has no others."""
        return ProcessedMedia({}, num_vectors)

    def largest_size(self) -> tuple[int, int]:
        """As many tiles as are taken, one below the other: most rows have ends."""
        return self._side * self._crops, self._side


def grid_of(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Rows and columns of tiles: as many as the image covers; where these are more than ``most``, those of
    the shape that is nearest to its own."""
    rows, columns = math.ceil(height / side), math.ceil(width / side)
    if rows * columns <= most:
        return rows, columns
    best, nearest = (1, 1), math.inf
    for columns, rows in sorted(
        {(i, j) for i in range(1, most + 1) for j in range(1, most // i + 1)}, key=_area
    ):
        apart = abs(width / height - columns / rows)
        is_large = width * height > 0.5 * side * side * columns * rows
        if apart < nearest or (apart == nearest and is_large):
            best, nearest = (rows, columns), apart
    return best


def _area(grid: tuple[int, int]) -> int:
    return grid[0] * grid[1]


def _fitted(pixels: Pixels, most_height: int, most_width: int) -> tuple[int, int]:
    """Height and width of an image on a canvas that it fills in one direction.

    Raises: RequestError: a side would be hardly there.
    """
    height, width = pixels.shape[:2]
    if most_width / width < most_height / height:
        found = int(height * (most_width / width)), most_width
    else:
        found = most_height, int(width * (most_height / height))
    if min(found) < _LEAST:
        raise RequestError(
            f"image of {width} x {height} pixels: its shorter side would have {min(found)} pixels in tiles "
            f"of the model; must have {_LEAST}",
            param="multi_modal_data",
        )
    return found
