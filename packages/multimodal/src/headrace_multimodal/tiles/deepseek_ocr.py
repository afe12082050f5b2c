"""Images of DeepSeek-OCR: a page in small, on grey, and in tiles, if it is larger than one.

Wei et al. 2025, arXiv:2510.18234, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images.internvl import grid_of, tile_option, wrong_option
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed
from headrace_multimodal.images.settings import processor_settings
from headrace_multimodal.images.steps import HALVES, Numbers, cut, resized
from headrace_multimodal.images.vocabulary import special_token_id

LOCAL, GRID = "pixel_values_local", "patches_grid"
"""Model inputs: [tiles, 3, side, side], left out if there are none; [2] int64, columns and rows of tiles."""
CROPS, SIZE, MOST = "crop_mode", "base_size", "max_crops"
"""Options: whether there are tiles, the side of the page in small, and the most tiles."""
_SIZES = (512, 640, 1024, 1280)
_SIDE, _LEAST, _MOST_TILES = 640, 2, 9
"""Of tiles, as the published code has them."""
_STRETCHED = 640
"""A page that is no larger is stretched to a square, where there are no tiles."""
_PIXELS = 64
"""Pixels of a side of what becomes a vector."""
Grid = tuple[int, int]
"""Columns and rows."""


class DeepseekOCRProcessor(ImageProcessor):
    """``pixel_values`` are [1, 3, side, side], the page in small; see also :data:`LOCAL` and :data:`GRID`.

    A token stands for each vector: rows of all tiles together, each with an end; rows of the page in small;
    and one behind them.
    """

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        stated = {**processor_settings(path), **self.stated}
        for key, only in (("patch_size", 16), ("downsample_ratio", 4), ("normalize", True)):
            if stated.get(key, only) != only:
                raise UnsupportedModel(
                    f"image processor: {key} = {stated[key]!r}: must be {only!r}"
                )
        self._numbers = Numbers.of(stated, HALVES, HALVES)
        self._grey = tuple(int(mean * 255) for mean in self._numbers.mean or HALVES)

    def find_placeholder(self) -> int:
        """The token of a vector; configs do not say it."""
        return special_token_id(self.path, self.text)

    def options(self) -> Sequence[str]:
        return (CROPS, SIZE, MOST)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: the image is too narrow, or an option is not accepted."""
        crops, size = options.get(CROPS, True), options.get(SIZE, 1024)
        if type(crops) is not bool:
            raise wrong_option(CROPS, crops, "true or false")
        if type(size) is not int or size not in _SIZES:
            raise wrong_option(SIZE, size, f"one of {', '.join(map(str, _SIZES))}")
        most = tile_option(options, MOST, _MOST_TILES, _MOST_TILES)
        stretched = not crops and size <= _STRETCHED
        small = (
            resized(pixels, size, size) if stretched else on_colour(pixels, size, size, self._grey)
        )
        number = _num_vectors((1, 1), size) + 1
        inputs = {PIXEL_VALUES: packed(self._numbers(small)[None])}
        grid = 1, 1
        if crops and most >= _LEAST and max(pixels.shape[:2]) > _SIDE:
            grid = grid_of(pixels.shape[:2], (_SIDE, _SIDE), _LEAST, most)
            tiles = cut(resized(pixels, grid[1] * _SIDE, grid[0] * _SIDE), _SIDE)
            inputs[LOCAL] = packed(np.stack([self._numbers(tile) for tile in tiles]))
            number += _num_vectors(grid, _SIDE)
        inputs[GRID] = packed(np.array(grid, np.int64))
        return ProcessedMedia(inputs, number)

    def largest_size(self) -> tuple[int, int]:
        """The size of as many tiles as are cut, one below the other, where most rows end."""
        return _SIDE * _MOST_TILES, _SIDE


def on_colour(pixels: Pixels, width: int, height: int, colour: tuple[int, ...]) -> Pixels:
    """As large as fits into a rectangle, in the middle of it.

    Raises: RequestError: nothing of it would be left.
    """
    rows, columns = pixels.shape[:2]
    if not round(min(height, width * rows / columns)) or not round(
        min(width, height * columns / rows)
    ):
        raise RequestError(
            f"image of {columns} x {rows} pixels: is too narrow for this model",
            param="multi_modal_data",
        )
    image = ImageOps.pad(Image.fromarray(pixels), (width, height), color=colour)
    return np.asarray(image)


def _num_vectors(grid: Grid, side: int) -> int:
    """Of all tiles together, with an end for each row."""
    columns, rows = (-(-side // _PIXELS) * number for number in grid)
    return rows * (columns + 1)
