"""Images of InternVL as published: cut into tiles of one size, with the whole image in small behind them.

Chen et al. 2024, arXiv:2404.16821, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.internvl import grid_of, tile_option, wrong_option
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed, part
from headrace_multimodal.images.steps import Numbers, cut, resized
from headrace_multimodal.images.vocabulary import special_token_id
from headrace_multimodal.images.words import Words

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's."""
_MOST_TILES = 1 << 10
CUTS, LEAST, MOST, WHOLE = (
    "dynamic_image_size", "min_dynamic_patch", "max_dynamic_patch", "use_thumbnail",
)  # fmt: skip


class InternVLChatProcessor(ImageProcessor):
    """A token for each vector of each tile, between one of begin and one of end. ``pixel_values`` are
    [tiles, 3, side, side].

    Prompts have ``<image>`` for an image, which is text and no token, or the token of a vector.
    """

    text = "<IMG_CONTEXT>"
    written: ClassVar[str] = "<image>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        if config.get("pad2square"):
            raise UnsupportedModel(
                "config.json: pad2square = True: must be false; images are not padded to squares"
            )
        vision = part(config, "vision_config")
        self._side = _number(vision, "image_size", 224)
        if _number(config, "force_image_size", self._side) != self._side:
            raise UnsupportedModel(
                f"config.json: force_image_size = {config['force_image_size']}: the tower takes images of "
                f"{self._side}"
            )
        ratio = config.get("downsample_ratio", 0.5)
        if type(ratio) not in (int, float) or not 0 < ratio <= 1:
            raise UnsupportedModel(
                f"config.json: downsample_ratio = {ratio!r}: must be a number up to 1"
            )
        self._per_tile = int((self._side // _number(vision, "patch_size", 14)) ** 2 * ratio**2)
        self._least, self._most = _number(config, LEAST, 1), _number(config, MOST, 6)
        self._cuts, self._has_whole = _flag(config, CUTS), _flag(config, WHOLE)
        self._numbers = Numbers.of(self.stated, _MEAN, _STD)
        self._words = Words(path)
        self._check_words()

    def _check_words(self) -> None:
        """Read the tokens that stand around an image.

        Raises: UnsupportedModel: the tokenizer has none.
        """
        self._begin, self._end = (special_token_id(self.path, name) for name in ("<img>", "</img>"))

    def find_placeholder(self) -> int:
        """The token of a vector; configs do not say it."""
        return special_token_id(self.path, self.text)

    def options(self) -> Sequence[str]:
        return (CUTS, LEAST, MOST)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: an option is of another type, or allows more tiles than the model's
        settings."""
        x = np.stack([self._numbers(tile) for tile in self.tiles(pixels, options)])
        tokens, runs = self._tokens(len(x))
        return ProcessedMedia({PIXEL_VALUES: packed(x)}, len(tokens), tokens, runs)

    def tiles(self, pixels: Pixels, options: Mapping[str, Any]) -> list[Pixels]:
        """[side, side, 3] each, in the order of their vectors; see :meth:`one`."""
        return self._tiles(pixels, self._grid(pixels, options))

    def _tokens(self, count: int) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Tokens of an image of so many tiles, and the runs that take vectors."""
        vectors = [self.placeholder_id] * count * self._per_tile
        return (self._begin, *vectors, self._end), ((1, len(vectors)),)

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`."""
        if media and self.placeholder_id not in token_ids:
            token_ids = self._words.replaced(token_ids, self.written, self.placeholder_id)
        return super().place(token_ids, media)

    def largest_size(self) -> tuple[int, int]:
        """The size of as many tiles as options may ask for, side by side."""
        return self._side, self._side * self._most

    def blank(self, height: int, width: int) -> ProcessedMedia:
        """In tiles, as options may ask for."""
        return self.one(np.zeros((height, width, 3), np.uint8), {CUTS: True})

    def _grid(self, pixels: Pixels, options: Mapping[str, Any]) -> tuple[int, int]:
        """Columns and rows of tiles."""
        cuts = options.get(CUTS, self._cuts)
        if type(cuts) is not bool:
            raise wrong_option(CUTS, cuts, "true or false")
        most = tile_option(options, MOST, self._most, self._most)
        least = tile_option(options, LEAST, min(self._least, most), most)
        return grid_of(pixels.shape[:2], (self._side, self._side), least, most) if cuts else (1, 1)

    def _tiles(self, pixels: Pixels, grid: tuple[int, int]) -> list[Pixels]:
        """Tiles row by row; the whole image in small, if there is more than one."""
        columns, rows = grid
        tiles = cut(resized(pixels, rows * self._side, columns * self._side), self._side)
        if len(tiles) > 1 and self._has_whole:
            tiles.append(resized(pixels, self._side, self._side))
        return tiles


def _number(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    value = default if value is None else value
    most = _MOST_TILES if key in (LEAST, MOST) else 1 << 14
    if type(value) is not int or not 0 < value <= most:
        raise UnsupportedModel(f"config.json: {key} = {value!r}: must be a number from 1 to {most}")
    return value


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    value = False if value is None else value
    if type(value) is not bool:
        raise UnsupportedModel(f"config.json: {key} = {value!r}: must be true or false")
    return value
