"""Images of Llama 3.1 Nemotron Nano VL: cut into tiles as InternVL's are, by another rule of which grid is
best, with the whole in small behind them; and of Nemotron Nano V2 VL, by InternVL's own rule.

NVIDIA 2025, "Llama-3.1-Nemotron-Nano-VL-8B-V1" and arXiv:2511.03929.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images import internvl
from headrace_multimodal.images.internvl import tile_option
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed
from headrace_multimodal.images.steps import Numbers, cut, resized
from headrace_multimodal.images.vocabulary import special_token_id

MOST = "max_num_tiles"
_ENOUGH = 0.6
"""A grid of more than this part of the image's area is no better."""
Grid = tuple[int, int]
"""Columns and rows of tiles."""


class NemotronVLProcessor(ImageProcessor):
    """``pixel_values`` are [tiles, 3, side, side], from 0 to 1: the tower normalises them itself.

    A token stands for each vector of each tile, between one of begin and one of end.
    """

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._side = _number(config, "force_image_size", None)
        if self.stated.get("image_size", self._side) != self._side:
            raise UnsupportedModel(
                f"image processor: image_size = {self.stated['image_size']!r}: config.json says "
                f"force_image_size = {self._side}"
            )
        ratio = config.get("downsample_ratio", 0.5)
        if type(ratio) not in (int, float) or not 0 < ratio <= 1:
            raise UnsupportedModel(
                f"config.json: downsample_ratio = {ratio!r}: must be a number up to 1"
            )
        patch = _number(config, "patch_size", 16)
        self._per_tile = int((self._side // patch) ** 2 * ratio**2)
        self._most = _number(self.stated, MOST, 12)
        self._has_whole = bool(self.stated.get("use_thumbnail", True))
        self._numbers = self.numbers()
        self._begin, self._end = (special_token_id(path, name) for name in ("<img>", "</img>"))

    def find_placeholder(self) -> int:
        """The token of a vector; configs do not say it."""
        return special_token_id(self.path, self.text)

    def options(self) -> Sequence[str]:
        return (MOST,)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: the option is no number of tiles, or more than the settings allow."""
        most = tile_option(options, MOST, self._most, self._most)
        tiles = in_tiles(
            pixels,
            self.grid(pixels.shape[:2], self._side, most),
            self._side,
            with_whole=self._has_whole,
        )
        x = np.stack([self._numbers(tile) for tile in tiles])
        count = len(x) * self._per_tile
        tokens = (self._begin, *[self.placeholder_id] * count, self._end)
        return ProcessedMedia({PIXEL_VALUES: packed(x)}, count + 2, tokens, ((1, count),))

    def numbers(self) -> Numbers:
        """From bytes to what the tower takes."""
        return Numbers(mean=None, std=None)

    def grid(self, image: tuple[int, ...], side: int, most: int) -> Grid:
        """See :func:`grid_of`."""
        return grid_of(image, side, most)

    def largest_size(self) -> tuple[int, int]:
        """The size of as many tiles as are cut, side by side."""
        return self._side, self._side * self._most


class NemotronVL2Processor(NemotronVLProcessor):
    """The same, with normalised numbers, of which settings or the config say the mean."""

    def numbers(self) -> Numbers:
        stated = {
            f"image_{key}": self.stated.get(f"norm_{key}", self.config.get(f"norm_{key}"))
            for key in ("mean", "std")
        }
        missing = [key.replace("image", "norm") for key, value in stated.items() if value is None]
        if missing:
            raise UnsupportedModel(f"config.json: {missing[0]} = None: must be three numbers")
        return Numbers.of(stated)

    def grid(self, image: tuple[int, ...], side: int, most: int) -> Grid:
        """See :func:`headrace_multimodal.images.internvl.grid_of`."""
        return internvl.grid_of(image, (side, side), 1, most)


def in_tiles(pixels: Pixels, grid: Grid, side: int, *, with_whole: bool) -> list[Pixels]:
    """Tiles row by row; the whole image in small, if it is wanted and there is more than one."""
    columns, rows = grid
    tiles = cut(resized(pixels, rows * side, columns * side), side)
    if len(tiles) > 1 and with_whole:
        tiles.append(resized(pixels, side, side))
    return tiles


def grid_of(image: tuple[int, ...], side: int, most: int, least: int = 1) -> Grid:
    """The grid that is best by its area and shape together; the first of equals.

    Args:
        image: height and width.
        side: of a tile.
        most, least: tiles.
    """
    shape, area = image[1] / image[0], image[0] * image[1]

    def worth(grid: Grid) -> float:
        columns, rows = grid
        own = columns / rows
        return min(columns * rows * side * side / area, _ENOUGH) * min(own / shape, shape / own)

    return max(_grids(least, most), key=worth)


@lru_cache(maxsize=16)
def _grids(least: int, most: int) -> Sequence[Grid]:
    """All grids of so many tiles at least and at most, by their number; those of one number in the order of
    a set, as in the published code, where ties depend on it."""
    found = {
        (columns, rows)
        for number in range(least, most + 1)
        for columns in range(1, number + 1)
        for rows in range(1, number + 1)
        if least <= columns * rows <= most
    }
    return sorted(found, key=lambda grid: grid[0] * grid[1])


def _number(config: Mapping[str, Any], key: str, default: int | None) -> int:
    value = config.get(key, default)
    if type(value) is not int or not 0 < value <= 1 << 12:
        raise UnsupportedModel(f"{key} = {value!r}: must be a number from 1 to {1 << 12}")
    return value
