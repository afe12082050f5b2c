"""Images of LFM2-VL: in their own shape and within bounds of their area, or cut into tiles with the whole in
small behind them.

Liquid AI 2025, arXiv:2511.23404; Tschannen et al. 2025, arXiv:2502.14786.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed, part
from headrace_multimodal.images.settings import processor_settings
from headrace_multimodal.images.steps import BILINEAR, HALVES, Float, Numbers, cut, resized
from headrace_multimodal.images.vocabulary import named_token
from headrace_multimodal.images.words import Words, widened

SHAPES = "spatial_shapes"
SPLITS, MOST_TILES, LEAST, MOST = (
    "do_image_splitting", "max_tiles", "min_image_tokens", "max_image_tokens",
)  # fmt: skip
_DEFAULTS: Mapping[str, int] = {
    "min_tiles": 2, MOST_TILES: 10, LEAST: 64, MOST: 256, "downsample_factor": 2,
    "encoder_patch_size": 16, "tile_size": 512,
}  # fmt: skip
_LARGEST = 1 << 14
_LONGEST = 200
"""Times of its shorter side that an image's longer one may have."""
Grid = tuple[int, int]
"""Columns and rows of tiles."""


class Lfm2VlProcessor(ImageProcessor):
    """See the module. ``pixel_values`` are [patches, patch * patch * 3] float32, tile by tile, the whole
    last; ``spatial_shapes`` [tiles, 2] int64 their rows and columns of patches.

    Each tile stands behind a token that says its row and column.
    """

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        stated = self.stated
        self._sizes = {key: _number(stated, key, default) for key, default in _DEFAULTS.items()}
        self._patch = self._sizes["encoder_patch_size"]
        self._unit = self._patch * self._sizes["downsample_factor"]
        self._tile = self._sizes["tile_size"]
        self._check(config)
        self._tolerance = stated.get("max_pixels_tolerance", 2.0)
        if type(self._tolerance) not in (int, float) or not 0 < self._tolerance < _LARGEST:
            raise UnsupportedModel(
                f"image processor: max_pixels_tolerance = {self._tolerance!r}: must be a number above 0"
            )
        self._splits = bool(stated.get(SPLITS, True)) and self._sizes[MOST_TILES] > 1
        self._has_whole = bool(stated.get("use_thumbnail", True))
        self._numbers = Numbers.of(stated, HALVES, HALVES)
        self._resample = int(stated.get("resample", BILINEAR))
        self._marked = bool(processor_settings(path).get("use_image_special_tokens", True))
        self._words = Words(path)
        names = {
            x: named_token(path, f"image_{x}_token", f"<|image_{x}|>") for x in ("start", "end")
        }
        names["whole"] = named_token(path, "image_thumbnail_token", "<|img_thumbnail|>")
        names["vector"] = named_token(path, "image_token", "<image>")
        self._names, self.text = names, names["vector"]
        self._words.check(**{names["vector"]: self.placeholder_id})
        self._tokens = lru_cache(maxsize=256)(self._expanded)

    def options(self) -> Sequence[str]:
        return (SPLITS, MOST_TILES, LEAST, MOST)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: the image is too narrow, or an option is of another type, or allows more than
        the model's settings."""
        chosen = {**self._sizes, SPLITS: self._splits, **options}
        self._check_options(chosen)
        height, width = pixels.shape[:2]
        if max(height, width) > _LONGEST * min(height, width):
            raise RequestError(
                f"image of {width} x {height} pixels: one side may be {_LONGEST} times the other at most",
                param="multi_modal_data",
            )
        size = self._fitted((height, width), chosen)
        grid = self._grid((height, width), chosen)
        tiles = self._tiles(pixels, grid, size)
        shapes = [(len(tile) // self._patch, tile.shape[1] // self._patch) for tile in tiles]
        ids, runs = self._tokens(grid, size)
        inputs = {
            PIXEL_VALUES: packed(np.concatenate([self._patches(tile) for tile in tiles])),
            SHAPES: packed(np.array(shapes, np.int64)),
        }
        return ProcessedMedia(inputs, len(ids), ids, runs)

    def largest_size(self) -> tuple[int, int]:
        """As many tiles as are cut, side by side, or an image that is not cut."""
        if self._splits:
            return self._tile, self._tile * self._sizes[MOST_TILES]
        side = math.ceil(math.sqrt(self._sizes[MOST])) * self._unit
        return side, side

    def _check(self, config: Mapping[str, Any]) -> None:
        """Raises: UnsupportedModel: settings do not fit each other, or those of the towers."""
        sizes = self._sizes
        for mine, theirs, key in (
            (
                "encoder_patch_size",
                part(config, "vision_config").get("patch_size", 16),
                "patch_size",
            ),
            ("downsample_factor", config.get("downsample_factor", 2), "downsample_factor"),
        ):
            if sizes[mine] != theirs:
                raise UnsupportedModel(
                    f"image processor: {mine} = {sizes[mine]}: config.json says {key} = {theirs!r}"
                )
        if self._tile % self._unit:
            raise UnsupportedModel(
                f"image processor: tile_size = {self._tile}: must be a multiple of {self._unit} pixels"
            )
        if sizes[LEAST] > sizes[MOST]:
            raise UnsupportedModel(
                f"image processor: {LEAST} = {sizes[LEAST]}: must be at most {MOST} = {sizes[MOST]}"
            )
        if sizes["min_tiles"] > sizes[MOST_TILES] or sizes["min_tiles"] == 1 < sizes[MOST_TILES]:
            raise UnsupportedModel(
                f"image processor: min_tiles = {sizes['min_tiles']}: must be from 2 to max_tiles = "
                f"{sizes[MOST_TILES]}"
            )

    def _check_options(self, chosen: Mapping[str, Any]) -> None:
        """Raises: RequestError: see :meth:`one`."""
        sizes = self._sizes
        for name, low, high in (
            (MOST_TILES, sizes["min_tiles"], sizes[MOST_TILES]),
            (LEAST, 1, sizes[MOST]),
            (MOST, chosen[LEAST], sizes[MOST]),
        ):
            if type(chosen[name]) is not int or not low <= chosen[name] <= high:
                raise _wrong_option(name, chosen[name], f"a number from {low} to {high}")
        if type(chosen[SPLITS]) is not bool or chosen[SPLITS] > self._splits:
            raise _wrong_option(
                SPLITS, chosen[SPLITS], "true or false, and true only where images are cut"
            )

    def _fitted(self, image: tuple[int, int], chosen: Mapping[str, Any]) -> tuple[int, int]:
        """Height and width of the whole: of whole vectors, their number within its bounds."""
        unit, (height, width) = self._unit, image
        least, most = (chosen[key] * unit**2 for key in (LEAST, MOST))
        rows, columns = (max(1, round(size / unit)) for size in image)
        if rows * columns * unit**2 > most:
            scale = math.sqrt(height * width / most)
            rows, columns = (max(1, math.floor(size / scale / unit)) for size in image)
        elif rows * columns * unit**2 < least:
            scale = math.sqrt(least / (height * width))
            rows, columns = (math.ceil(size * scale / unit) for size in image)
        return rows * unit, columns * unit

    def _grid(self, image: tuple[int, int], chosen: Mapping[str, Any]) -> Grid:
        """Columns and rows of tiles; (1, 1): the image is not cut."""
        height, width = (max(self._patch, round(size / self._unit) * self._unit) for size in image)
        bound = chosen[MOST] * self._unit**2 * self._tolerance
        if not chosen[SPLITS] or height * width <= bound:
            return 1, 1
        return nearest_grid(image, self._tile, self._sizes["min_tiles"], chosen[MOST_TILES])

    def _tiles(self, pixels: Pixels, grid: Grid, size: tuple[int, int]) -> list[Pixels]:
        """Tiles row by row, then the whole."""
        columns, rows = grid
        whole = [resized(pixels, *size, self._resample)]
        if grid == (1, 1):
            return whole
        large = resized(pixels, rows * self._tile, columns * self._tile, self._resample)
        return cut(large, self._tile) + (whole if self._has_whole else [])

    def _patches(self, pixels: Pixels) -> Float:
        """[height, width, 3] uint8 -> [rows * columns, patch * patch * 3] float32."""
        values, patch = self._numbers(pixels), self._patch
        _, height, width = values.shape
        blocks = values.reshape(3, height // patch, patch, width // patch, patch)
        return blocks.transpose(1, 3, 2, 4, 0).reshape(-1, 3 * patch**2)

    def _expanded(
        self, grid: Grid, size: tuple[int, int]
    ) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Tokens of an image in so many tiles, and the runs that take vectors."""
        columns, rows = grid
        names, per_tile = self._names, (self._tile // self._unit) ** 2
        whole = names["vector"] * (size[0] // self._unit * (size[1] // self._unit))
        texts = [whole]
        if grid != (1, 1):
            texts = [
                (f"<|img_row_{row + 1}_col_{column + 1}|>" if self._marked else "")
                + names["vector"] * per_tile
                for row in range(rows)
                for column in range(columns)
            ]
            if self._has_whole:
                texts.append((names["whole"] if self._marked else "") + whole)
        text = "".join(texts)
        if self._marked:
            text = f"{names['start']}{text}{names['end']}"
        return widened(self._words.ids(text), self.placeholder_id, 1)


def nearest_grid(image: tuple[int, int], tile: int, least: int, most: int) -> Grid:
    """The grid whose shape is nearest to an image's; of several the last that does not have twice the image's
    pixels.

    Args:
        image: height and width.
        tile: side of a tile.
        least, most: tiles.
    """
    height, width = image
    best, nearest = (1, 1), math.inf
    for columns, rows in _grids(least, most):
        away = abs(width / height - columns / rows)
        fills = height * width > 0.5 * tile**2 * columns * rows
        if away < nearest or (away == nearest and fills):
            best, nearest = (columns, rows), away
    return best


@lru_cache(maxsize=16)
def _grids(least: int, most: int) -> Sequence[Grid]:
    """All grids of so many tiles, by their number; those of one number in the order of a set, as in the
    library, where ties depend on it."""
    found = {
        (columns, rows)
        for number in range(least, most + 1)
        for columns in range(1, number + 1)
        for rows in range(1, number + 1)
        if least <= columns * rows <= most
    }
    return sorted(found, key=lambda grid: grid[0] * grid[1])


def _number(stated: Mapping[str, Any], key: str, default: int) -> int:
    value = stated.get(key, default)
    most = 1 << 7 if key.endswith("tiles") else _LARGEST
    if type(value) is not int or not 0 < value <= most:
        raise UnsupportedModel(
            f"image processor: {key} = {value!r}: must be a number from 1 to {most}"
        )
    return value


def _wrong_option(name: str, value: object, accepted: str) -> RequestError:
    return RequestError(
        f"mm_processor_kwargs.{name} = {value!r}: must be {accepted}", param="mm_processor_kwargs"
    )
