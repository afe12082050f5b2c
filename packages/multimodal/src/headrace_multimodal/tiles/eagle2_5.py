"""Images of Eagle 2.5: cut into tiles by the rule of Nemotron Nano VL, each image behind a text that says its
number.

Chen et al. 2025, arXiv:2504.15271, section 3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.images.internvl import tile_option
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import (
    PIXEL_VALUES,
    ImageProcessor,
    packed,
    part,
    token_id,
)
from headrace_multimodal.images.steps import HALVES, Numbers
from headrace_multimodal.images.vocabulary import special_token_id
from headrace_multimodal.tiles.nemotron_vl import grid_of, in_tiles
from headrace_multimodal.tiles.pieces import PromptPieces, numbered

LEAST, MOST = "min_dynamic_tiles", "max_dynamic_tiles"
_MARK = re.compile(r"<image-(\d+)>|<IMG_CONTEXT>")
_MOST_TILES = 1 << 10


class Eagle25Processor(ImageProcessor):
    """A token for each vector of each tile, between one of begin and one of end. ``pixel_values`` are
    [tiles, 3, side, side].

    Prompts have ``<image-1>`` and so on, by the images' numbers, which are text and no tokens; or the token
    of a vector, for the next one. What says an image's number becomes tokens together with what stands
    before it.
    """

    text = "<IMG_CONTEXT>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        vision = part(config, "vision_config")
        self._side, patch = vision.get("image_size", 224), vision.get("patch_size", 16)
        if not (type(self._side) is int and type(patch) is int and 0 < patch <= self._side <= 4096):
            raise UnsupportedModel(
                f"config.json: vision_config.image_size = {self._side!r}, patch_size = {patch!r}: must be "
                "sizes"
            )
        self._check(self.stated)
        ratio = config.get("downsample_ratio", 0.5)
        if type(ratio) not in (int, float) or not 0 < ratio <= 1:
            raise UnsupportedModel(
                f"config.json: downsample_ratio = {ratio!r}: must be a number up to 1"
            )
        self._per_tile = int((self._side // patch) ** 2 * ratio**2)
        self._least, self._most = self._bound(LEAST, 1), self._bound(MOST, 12)
        self._has_whole = bool(self.stated.get("use_thumbnail", True))
        self._numbers = Numbers.of(self.stated, HALVES, HALVES)
        self._begin, self._end = (special_token_id(path, name) for name in ("<img>", "</img>"))
        self._pieces = PromptPieces(path)
        self._pieces.words.check(**{self.text: self.placeholder_id})

    def find_placeholder(self) -> int:
        """The token of a vector."""
        return token_id(self.config, "image_token_index")

    def placeholder(self, modality: Modality, index: int) -> str:
        return f"<image-{index + 1}>"

    def options(self) -> Sequence[str]:
        return (LEAST, MOST)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: an option is no number of tiles, or more than the settings allow."""
        most = tile_option(options, MOST, self._most, self._most)
        least = tile_option(options, LEAST, min(self._least, most), most)
        grid = grid_of(pixels.shape[:2], self._side, most, least)
        tiles = in_tiles(pixels, grid, self._side, with_whole=self._has_whole)
        x = np.stack([self._numbers(tile) for tile in tiles])
        count = len(x) * self._per_tile
        tokens = (self._begin, *[self.placeholder_id] * count, self._end)
        return ProcessedMedia({PIXEL_VALUES: packed(x)}, count + 2, tokens, ((1, count),))

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Raises: RequestError: images and their marks are not of the same numbers."""
        if not media:
            return super().place(token_ids, media)
        text = self._pieces.text(token_ids)
        matches = list(_MARK.finditer(text))
        order = numbered([match[1] for match in matches], len(media))
        found: list[int] = []
        offsets, done = [-1] * len(media), 0
        for index, match in zip(order, matches, strict=True):
            found += self._pieces.words.ids(f"{text[done : match.start()]}<image {index + 1}>")
            offsets[index], done = len(found), match.end()
            found += media[index].token_ids
        return MediaPlacement(found + self._pieces.words.ids(text[done:]), offsets)

    def largest_size(self) -> tuple[int, int]:
        """The size of as many tiles as are cut, side by side."""
        return self._side, self._side * self._most

    def _check(self, stated: Mapping[str, Any]) -> None:
        """Raises: UnsupportedModel: settings make tiles of another size, or of another kind."""
        if stated.get("pad_during_tiling"):
            raise UnsupportedModel(
                "image processor: pad_during_tiling = True: must be false; images take the shape of "
                "their grid"
            )
        for key in ("size", "crop_size"):
            size = stated.get(key)
            if size is not None and size != {"height": self._side, "width": self._side}:
                raise UnsupportedModel(
                    f"image processor: {key} = {size!r}: the tower takes images of {self._side}"
                )

    def _bound(self, key: str, default: int) -> int:
        value = self.stated.get(key, default)
        if type(value) is not int or not 0 < value <= _MOST_TILES:
            raise UnsupportedModel(
                f"image processor: {key} = {value!r}: must be a number from 1 to {_MOST_TILES}"
            )
        return value
