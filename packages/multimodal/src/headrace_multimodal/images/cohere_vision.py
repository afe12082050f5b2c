"""Images of Aya Vision and Command A Vision: a grid of tiles that suits the image, and a small picture of the
whole behind them.

Dash et al. 2025, arXiv:2505.08751; Cohere 2025, "Command A Vision".
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed, part
from headrace_multimodal.images.settings import processor_settings
from headrace_multimodal.images.steps import BICUBIC, Numbers, cut, resized, two_sizes
from headrace_multimodal.images.words import Words, widened

Grid = tuple[int, int]
"""Tiles in a column and in a row."""
CROPS = "crop_to_patches"
MAX_TILES = 1 << 10


class TiledProcessor(ImageProcessor):
    """What both have in common. ``pixel_values`` are [tiles, 3, side, side]."""

    default_side: ClassVar[int]
    """Of a tile, where settings leave it out."""
    patch_token: str
    """Text of the token that stands for a vector."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        vision, stated = part(config, "vision_config"), self.stated
        side = type(self).default_side
        size = two_sizes(stated.get("size", {"height": side, "width": side}), "size")
        known, patch = vision.get("image_size", 384), vision.get("patch_size", 16)
        factor = config.get("downsample_factor", 2)
        if size != (known, known):
            raise UnsupportedModel(
                f"image processor: size = {size}: config.json says vision_config.image_size = {known!r}"
            )
        if not all(type(x) is int and x > 0 for x in (patch, factor)) or size[0] // patch % factor:
            raise UnsupportedModel(
                f"config.json: downsample_factor = {factor!r}: must divide a tile's patches of "
                f"vision_config.patch_size = {patch!r}"
            )
        if not stated.get("do_resize", True):
            raise UnsupportedModel("image processor: do_resize = False: must be true")
        self.tile = size[0]
        self.fewest, self.most = (
            _number(stated, "min_patches", 1),
            _number(stated, "max_patches", 12),
        )
        self._resample = int(stated.get("resample", BICUBIC))
        self._numbers = Numbers.of(stated)
        self._per_tile = (self.tile // patch // factor) ** 2
        self.words = Words(path)
        self.read_words()
        self.words.check(**{self.patch_token: self.placeholder_id})
        self._tokens = lru_cache(maxsize=64)(self._expanded)

    @abstractmethod
    def read_words(self) -> None:
        """Find the texts of tokens, :attr:`patch_token` among them."""

    @abstractmethod
    def written(self, tiles: int) -> str:
        """What stands in a prompt for an image of so many tiles, with one :attr:`patch_token` for each."""

    @abstractmethod
    def grid(self, image: tuple[int, int]) -> Grid:
        """The grid for an image of that height and width."""

    def crops(self) -> bool:
        """Images are cut, unless a request says otherwise."""
        return bool(self.stated.get(CROPS, True))

    def options(self) -> Sequence[str]:
        return (CROPS,)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: an option is not true or false."""
        crops = options.get(CROPS, self.crops())
        if not isinstance(crops, bool):
            raise RequestError(
                f"mm_processor_kwargs.{CROPS} = {crops!r}: must be true or false",
                param="mm_processor_kwargs",
            )
        rows, columns = self.grid((pixels.shape[0], pixels.shape[1])) if crops else (1, 1)
        edge = self.tile
        tiles = cut(resized(pixels, rows * edge, columns * edge, self._resample), edge)
        if len(tiles) > 1:
            tiles.append(resized(pixels, edge, edge, self._resample))
        ids, runs = self._tokens(len(tiles))
        values = np.stack([self._numbers(tile) for tile in tiles])
        return ProcessedMedia({PIXEL_VALUES: packed(values)}, len(ids), ids, runs)

    def _expanded(self, tiles: int) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        ids = self.words.ids(self.written(tiles))
        return widened(ids, self.placeholder_id, self._per_tile)

    def largest_size(self) -> tuple[int, int]:
        return self.tile, self.tile * (self.most if self.crops() else 1)


class AyaVisionProcessor(TiledProcessor):
    """Aya Vision's: the grid whose shape is nearest to the image's; each tile has a number.

    Chat templates write ``<image>`` for an image, which need be no token: prompts may have its text, or the
    token of a vector.
    """

    text = "<|IMG_PATCH|>"
    default_side: ClassVar[int] = 384

    def read_words(self) -> None:
        said = processor_settings(self.path)
        self.patch_token = _word(said, "img_patch_token", "<|IMG_PATCH|>")
        self._start = _word(said, "start_of_img_token", "<|START_OF_IMG|>")
        self._end = _word(said, "end_of_img_token", "<|END_OF_IMG|>")
        self._tile = _word(said, "tile_token", "TILE")
        self._whole = _word(said, "tile_global_token", "TILE_GLOBAL")
        self._image = _word(said, "image_token", "<image>")
        self.text = self.patch_token

    def crops(self) -> bool:
        # Its prompts always have tiles, whatever the image processor's own settings say.
        return True

    def written(self, tiles: int) -> str:
        numbered = [f"{self._tile}_{index}{self.patch_token}" for index in range(1, tiles)]
        return f"{self._start}{''.join(numbered)}{self._whole}{self.patch_token}{self._end}"

    def grid(self, image: tuple[int, int]) -> Grid:
        return nearest_shape(image, self.tile, self.fewest, self.most)

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`."""
        if media and self.placeholder_id not in token_ids:
            token_ids = self.words.replaced(token_ids, self._image, self.placeholder_id)
        return super().place(token_ids, media)


class Cohere2VisionProcessor(TiledProcessor):
    """Command A Vision's: the smallest grid that holds the image; each tile ends with a token."""

    default_side: ClassVar[int] = 512

    def read_words(self) -> None:
        said = _tokenizer_settings(self.path)
        self.patch_token = _word(said, "image_token", "<|IMG_PATCH|>")
        self._start = _word(said, "boi_token", "<|START_OF_IMG|>")
        self._end = _word(said, "eoi_token", "<|END_OF_IMG|>")
        self._line = _word(said, "img_line_break_token", "<|IMG_LINE_BREAK|>")
        self.text = self.patch_token

    def written(self, tiles: int) -> str:
        return f"{self._start}{(self.patch_token + self._line) * tiles}{self._end}"

    def grid(self, image: tuple[int, int]) -> Grid:
        return smallest_cover(image, self.tile, self.most)


def grids(fewest: int, most: int) -> list[Grid]:
    """Grids of so many tiles, those of few first, and among equals those of few columns."""
    sides = range(1, most + 1)
    found = [
        (rows, columns) for columns in sides for rows in sides if fewest <= rows * columns <= most
    ]
    return sorted(found, key=lambda grid: grid[0] * grid[1])


def nearest_shape(image: tuple[int, int], tile: int, fewest: int, most: int) -> Grid:
    """The grid whose width over height is nearest to the image's; among equals the one of more tiles, up to
    twice the image's area."""
    height, width = image
    best, least = (1, 1), float("inf")
    for rows, columns in grids(fewest, most):
        difference = abs(width / height - columns / rows)
        larger = difference == least and width * height > 0.5 * tile * tile * columns * rows
        if difference < least or larger:
            best, least = (rows, columns), difference
    return best


def smallest_cover(image: tuple[int, int], tile: int, most: int) -> Grid:
    """The grid into which the image fits with the least enlargement; if it fits into none, the one that
    makes it smaller by the least."""
    height, width = image

    def scale(grid: Grid) -> float:
        return min(grid[1] * tile / width, grid[0] * tile / height)

    every = grids(1, most)
    holding = [grid for grid in every if scale(grid) >= 1]
    return min(holding, key=scale) if holding else max(every, key=scale)


def _tokenizer_settings(path: Path) -> Mapping[str, Any]:
    """Names of special tokens in ``tokenizer_config.json``; {}: it has none."""
    try:
        found = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    inner = [found.get(key) for key in ("extra_special_tokens", "model_specific_special_tokens")]
    named = {key: value for more in inner if isinstance(more, dict) for key, value in more.items()}
    return {**named, **found}


def _word(said: Mapping[str, Any], key: str, default: str) -> str:
    """A token's text, as a config names it.

    Raises: UnsupportedModel: it is none.
    """
    value = said.get(key, default)
    value = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(value, str) or not value:
        raise UnsupportedModel(f"tokenizer: {key} = {value!r}: must be a token's text")
    return value


def _number(stated: Mapping[str, Any], key: str, default: int) -> int:
    value = stated.get(key, default)
    if type(value) is not int or not 0 < value <= MAX_TILES:
        raise UnsupportedModel(f"image processor: {key} = {value!r}: must be a number of tiles")
    return value
