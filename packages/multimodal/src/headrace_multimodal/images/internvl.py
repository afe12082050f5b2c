"""InternVL's images: cut into tiles of one size, with the whole image in small behind them.

Chen et al. 2024, arXiv:2404.16821.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import (
    PIXEL_VALUES,
    ImageProcessor,
    packed,
    part,
)
from headrace_multimodal.images.steps import BICUBIC, Numbers, resized, two_sizes
from headrace_multimodal.images.vocabulary import named_token, special_token_id

_SIZE, _PATCH, _RATIO = 384, 14, 0.5
_MIN_TILES, _MAX_TILES = 1, 12
_MOST_TILES = 1 << 10
Grid = tuple[int, int]
"""Columns and rows of tiles."""


class InternVLProcessor(ImageProcessor):
    """A placeholder for each vector of each tile, between a token of begin and one of end."""

    text = "<IMG_CONTEXT>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        stated = self.stated
        self._tile = two_sizes(stated.get("size", _SIZE), "size")
        vision = part(config, "vision_config")
        patch, side = (
            _both(vision.get(key, d)) for key, d in (("patch_size", _PATCH), ("image_size", 448))
        )
        if side != self._tile:
            raise UnsupportedModel(
                f"image processor: size = {self._tile}: the tower takes images of {side}"
            )
        ratio = config.get("downsample_ratio", _RATIO)
        vectors = ((self._tile[0] // patch[0]) * ratio, (self._tile[1] // patch[1]) * ratio)
        self._per_tile = int(vectors[0]) * int(vectors[1])
        self._least = _tiles(stated, "min_patches", _MIN_TILES)
        self._most = _tiles(stated, "max_patches", _MAX_TILES)
        self._numbers = Numbers.of(stated)
        self._resample = int(stated.get("resample", BICUBIC))
        begin, end = (
            special_token_id(path, named_token(path, f"{which}_image_token", default))
            for which, default in (("start", "<img>"), ("end", "</img>"))
        )
        self._begin, self._end = begin, end

    def options(self) -> Sequence[str]:
        return ("crop_to_patches", "min_patches", "max_patches")

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: an option is not a number of tiles, or allows more of them than the model's
        settings."""
        most = tile_option(options, "max_patches", self._most, self._most)
        least = tile_option(options, "min_patches", min(self._least, most), most)
        # The class of the checkpoints cuts whatever the image processor's own settings say.
        cut = options.get("crop_to_patches", True)
        if type(cut) is not bool:
            raise wrong_option("crop_to_patches", cut, "true or false")
        grid = grid_of(pixels.shape[:2], self._tile, least, most) if cut and most > 1 else (1, 1)
        x = np.stack([self._numbers(tile) for tile in self._tiles(pixels, grid)])
        count = len(x) * self._per_tile
        tokens = (self._begin, *[self.placeholder_id] * count, self._end)
        return ProcessedMedia({PIXEL_VALUES: packed(x)}, count + 2, tokens, ((1, count),))

    def _tiles(self, pixels: Pixels, grid: Grid) -> list[Pixels]:
        """Tiles row by row; the whole image in small, if there is more than one."""
        height, width = self._tile
        columns, rows = grid
        whole = resized(pixels, rows * height, columns * width, self._resample)
        tiles = [
            whole[row * height : (row + 1) * height, column * width : (column + 1) * width]
            for row in range(rows)
            for column in range(columns)
        ]
        if len(tiles) == 1:
            return tiles
        return [*tiles, resized(pixels, height, width, self._resample)]

    def largest_size(self) -> tuple[int, int]:
        """The size of as many tiles as are cut, and near a square."""
        grids = _grids(self._least, self._most)
        columns, rows = max(grids, key=lambda grid: (grid[0] * grid[1], -abs(grid[0] - grid[1])))
        return rows * self._tile[0], columns * self._tile[1]


@lru_cache(maxsize=16)
def _grids(least: int, most: int) -> tuple[Grid, ...]:
    """All grids of so many tiles, the smaller ones first, then the narrower ones."""
    found = (
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if columns * rows >= least
    )
    return tuple(sorted(found, key=lambda grid: (grid[0] * grid[1], grid[0])))


def grid_of(
    size: tuple[int, ...],
    tile: tuple[int, int],
    least: int,
    most: int,
    accepted: Callable[[Grid], bool] | None = None,
) -> Grid:
    """The grid whose shape is nearest to an image's; of several the one with the most tiles that does not
    have twice the image's pixels.

    Args:
        size, tile: height and width, of the image and of a tile.
        least, most: tiles.
        accepted: grids that are looked at; None: all. Where there is none, the image is one tile.
    """
    shape, pixels = size[1] / size[0], size[0] * size[1]
    best, nearest = (1, 1), float("inf")
    for grid in filter(accepted, _grids(least, most)):
        columns, rows = grid
        away = abs(shape - columns / rows)
        fills = pixels > 0.5 * tile[0] * tile[1] * columns * rows
        if away < nearest or (away == nearest and fills):
            best, nearest = grid, away
    return best


def _both(size: object) -> tuple[int, int]:
    pair = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(pair) != 2 or not all(type(side) is int and side > 0 for side in pair):
        raise UnsupportedModel(f"config.json: vision_config: {size!r}: must be height and width")
    return pair


def _tiles(stated: Mapping[str, Any], key: str, default: int) -> int:
    value = stated.get(key, default)
    if type(value) is not int or not 0 < value <= _MOST_TILES:
        raise UnsupportedModel(f"image processor: {key} = {value!r}: must be a number of tiles")
    return value


def tile_option(options: Mapping[str, Any], name: str, default: int, most: int) -> int:
    """A number of tiles that a request asks for.

    Raises:
        RequestError: it is no whole number from 1 to ``most``.
    """
    value = options.get(name, default)
    if type(value) is not int or not 0 < value <= most:
        raise wrong_option(name, value, f"a number of tiles from 1 to {most}")
    return value


def wrong_option(name: str, value: object, accepted: str) -> RequestError:
    """The error for a value of ``mm_processor_kwargs`` that is not accepted."""
    return RequestError(
        f"mm_processor_kwargs.{name} = {value!r}: must be {accepted}", param="mm_processor_kwargs"
    )
