"""Ovis' images: cut into as few tiles as keep most of the picture, with the whole in small before them, and
between them marks of columns and rows, which take vectors as well.

Lu et al. 2024, arXiv:2405.20797. The published models fit each part into a tile and leave the rest of it
empty; transformers' class stretches the picture over all tiles.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.internvl import grid_of, tile_option, wrong_option
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import (
    PIXEL_VALUES,
    ImageProcessor,
    packed,
    part,
    token_id,
)
from headrace_multimodal.images.settings import processor_settings
from headrace_multimodal.images.steps import BICUBIC, HALVES, Float, Numbers, cut, resized
from headrace_multimodal.images.vocabulary import special_token_id
from headrace_multimodal.images.words import Words

_BEGIN, _WHOLE, _COLUMN, _ROW, _END, _WORD = 0, 1, 2, 3, 4, -1
"""Marks, as the model's input counts them, and a word of a tile."""
_COVERED = 0.9
_MOST_TILES = 1 << 8
Grid = tuple[int, int]
"""Rows and columns of parts."""


class _OvisProcessor(ImageProcessor):
    """``pixel_values`` are [tiles, 3, side, side]; ``marks`` [tokens] int64: which mark each of an image's
    tokens is; -1: a word of a tile."""

    text = "<image>"
    most_key: ClassVar[str]
    """Of the option that bounds the number of parts."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._side = _side(self.stated, 384)
        tower, stride = self.tower()
        patch = tower.get("patch_size", 14)
        side = tower.get("image_size", 224)
        if not all(type(x) is int and x > 0 for x in (patch, stride, side)) or side != self._side:
            raise UnsupportedModel(
                f"image processor: size = {self._side}: the tower takes images of {side!r} in patches of "
                f"{patch!r}, {stride!r} of a side to a word"
            )
        self.words = (-(-(side // patch) // stride)) ** 2
        self._resample = int(self.stated.get("resample", BICUBIC))
        self._most = self.stated.get(self.most_key, self.default_most())
        if type(self._most) is not int or not 0 < self._most <= _MOST_TILES:
            raise UnsupportedModel(
                f"image processor: {self.most_key} = {self._most!r}: must be a number of parts"
            )
        siglip = "siglip" in str(tower.get("model_type", ""))
        self._numbers = (
            Numbers.of(self.stated, HALVES, HALVES) if siglip else Numbers.of(self.stated)
        )
        self._ids = self.mark_ids()

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """The token of an image, and those that take vectors."""
        return (self.placeholder_id, *self._ids.values())

    @abstractmethod
    def tower(self) -> tuple[Mapping[str, Any], Any]:
        """The tower's part of the config, and how many patches of a side are a word."""

    @abstractmethod
    def default_most(self) -> int:
        """Parts, where the settings do not say how many."""

    @abstractmethod
    def mark_ids(self) -> Mapping[int, int]:
        """Token of each mark, and of a word."""

    def largest_size(self) -> tuple[int, int]:
        """As many parts as there are, one below the other."""
        return self._side * self._most, self._side

    def laid(self, tiles: Sequence[Float], grid: Grid) -> ProcessedMedia:
        """An image of these tiles, in so many rows and columns."""
        marks = _marks(grid, self.words)
        ids = tuple(self._ids[mark] for mark in marks)
        inputs = {PIXEL_VALUES: packed(np.stack(tiles)), "marks": packed(np.array(marks))}
        return ProcessedMedia(inputs, len(ids), ids, ((0, len(ids)),))


class Ovis2Processor(_OvisProcessor):
    """As transformers has it."""

    most_key = "max_patches"
    _TOKENS: ClassVar[Mapping[int, str]] = {
        _BEGIN: "<IMG_START>", _WHOLE: "<IMG_GRID>", _COLUMN: "<IMG_COL>", _ROW: "<IMG_ROW>",
        _END: "<IMG_END>",
    }  # fmt: skip

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        number = processor_settings(path).get("image_seq_length", 256)
        if number != self.words:
            raise UnsupportedModel(
                f"processor_config.json: image_seq_length = {number!r}: the tower makes {self.words} words "
                "of a tile"
            )
        self._cuts = _flag(self.stated, "crop_to_patches", False)
        self._covers = _flag(self.stated, "use_covering_area_grid", True)
        self._least = self.stated.get("min_patches", 1)

    def find_placeholder(self) -> int:
        return special_token_id(self.path, self.text)

    def tower(self) -> tuple[Mapping[str, Any], Any]:
        vision = part(self.config, "vision_config")
        return vision, vision.get("hidden_stride", 1)

    def default_most(self) -> int:
        return 12

    def mark_ids(self) -> Mapping[int, int]:
        stated = self.config.get("visual_indicator_token_ids")
        found = {mark: special_token_id(self.path, name) for mark, name in self._TOKENS.items()}
        if stated is not None and list(stated) != list(found.values()):
            raise UnsupportedModel(
                f"config.json: visual_indicator_token_ids = {stated!r}: the tokenizer's are "
                f"{list(found.values())}"
            )
        return {**found, _WORD: token_id(self.config, "image_token_id", "image_token_index")}

    def options(self) -> Sequence[str]:
        return ("crop_to_patches", "min_patches", self.most_key, "use_covering_area_grid")

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: an option is of another type, or allows more tiles than the model's
        settings."""
        most = tile_option(options, self.most_key, self._most, self._most)
        cuts = _flag_option(options, "crop_to_patches", self._cuts)
        columns, rows = self._grid(pixels, most, options) if cuts and most > 1 else (1, 1)
        side, resample = self._side, self._resample
        tiles = cut(resized(pixels, rows * side, columns * side, resample), side)
        if len(tiles) > 1:
            tiles.insert(0, resized(pixels, side, side, resample))
        return self.laid([self._numbers(tile) for tile in tiles], (rows, columns))

    def blank(self, height: int, width: int) -> ProcessedMedia:
        """In tiles, as options may ask for."""
        return self.one(np.zeros((height, width, 3), np.uint8), {"crop_to_patches": True})

    def _grid(self, pixels: Pixels, most: int, options: Mapping[str, Any]) -> tuple[int, int]:
        """Columns and rows. The library takes the rows of the grid that covers most for columns."""
        if _flag_option(options, "use_covering_area_grid", self._covers):
            return covering_grid(pixels.shape[0], pixels.shape[1], self._side, most)
        least = tile_option(options, "min_patches", min(self._least, most), most)
        return grid_of(pixels.shape[:2], (self._side, self._side), least, most)


class OvisProcessor(_OvisProcessor):
    """As published, 1.6 and 2. Prompts have ``<image>`` for an image, which is text and no token, or a token
    that the vocabulary does not use otherwise; it stands in place of words and marks."""

    most_key = "max_partition"
    _UNUSED: ClassVar[Mapping[str, str]] = {
        "qwen2": "<|image_pad|>", "gemma2": "<unused0>", "llama": "<|reserved_special_token_0|>",
    }  # fmt: skip
    """``model_type`` of the language model -> a token for places that take vectors."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._words = Words(path)

    def _unused(self) -> str:
        kind = str(part(self.config, "llm_config").get("model_type"))
        if kind not in self._UNUSED:
            raise UnsupportedModel(
                f"config.json: llm_config.model_type = {kind!r}: must be one of {', '.join(self._UNUSED)}"
            )
        return self._UNUSED[kind]

    def find_placeholder(self) -> int:
        return special_token_id(self.path, self._unused())

    def placeholder(self, modality: str, index: int) -> str:
        """The token, which no text around it changes."""
        return self._unused()

    def tower(self) -> tuple[Mapping[str, Any], Any]:
        whole = part(self.config, "visual_tokenizer_config")
        return part(whole, "backbone_config"), whole.get("hidden_stride", 1)

    def default_most(self) -> int:
        return 9

    def mark_ids(self) -> Mapping[int, int]:
        return dict.fromkeys((_BEGIN, _WHOLE, _COLUMN, _ROW, _END, _WORD), self.placeholder_id)

    def options(self) -> Sequence[str]:
        return (self.most_key,)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: the image is too narrow, or the option is no number of parts that the model's
        settings allow."""
        most = tile_option(options, self.most_key, self._most, self._most)
        grid = covering_grid(pixels.shape[0], pixels.shape[1], self._side, most)
        parts = _parts(pixels.shape[0], pixels.shape[1], grid)
        pieces = [pixels[top:bottom, left:right] for left, top, right, bottom in parts]
        if len(pieces) > 1:
            pieces.insert(0, pixels)
        return self.laid([self._fitted(piece) for piece in pieces], grid)

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`."""
        if media and self.placeholder_id not in token_ids:
            token_ids = self._words.replaced(token_ids, self.text, self.placeholder_id)
        return super().place(token_ids, media)

    def _fitted(self, piece: Pixels) -> Float:
        """A piece in the middle of a tile, whose other numbers are 0."""
        height, width = piece.shape[:2]
        side = self._side
        if width >= height:
            own = int(height / width * side), side
        else:
            own = side, int(width / height * side)
        if not all(own):
            raise RequestError(
                f"image of which a part has {width} x {height} pixels: is too narrow for this model",
                param="multi_modal_data",
            )
        tile = np.zeros((3, side, side), np.float32)
        top, left = (side - own[0]) // 2, (side - own[1]) // 2
        values = self._numbers(resized(piece, *own, self._resample))
        tile[:, top : top + own[0], left : left + own[1]] = values
        return tile


@lru_cache(maxsize=256)
def covering_grid(height: int, width: int, side: int, most: int) -> Grid:
    """The fewest parts that keep more than nine tenths of an image's pixels where each is fitted into a tile;
    where none do, those that keep most."""
    numbers = range(1, most + 1)
    grids = [(rows, columns) for rows in numbers for columns in numbers if rows * columns <= most]
    kept = {
        grid: sum(_kept(*p, side) for p in _parts(height, width, grid)) / (height * width)
        for grid in sorted(grids, key=lambda grid: grid[0] * grid[1])
    }
    good = [grid for grid, share in kept.items() if share > _COVERED]
    if good:
        return min(good, key=lambda grid: (grid[0] * grid[1], -kept[grid]))
    return min(kept, key=lambda grid: (-kept[grid], grid[0] * grid[1]))


def _parts(height: int, width: int, grid: Grid) -> list[tuple[int, int, int, int]]:
    """Left, top, right and bottom of each part, row by row; the last ones have what is left over."""
    rows, columns = grid
    tall, wide = height // rows, width // columns
    return [
        (
            column * wide,
            row * tall,
            width if column == columns - 1 else (column + 1) * wide,
            height if row == rows - 1 else (row + 1) * tall,
        )
        for row in range(rows)
        for column in range(columns)
    ]


def _kept(left: int, top: int, right: int, bottom: int, side: int) -> float:
    """Pixels of a part that is no longer than a tile."""
    short, long = sorted((right - left, bottom - top))
    return short / long * side * side if long > side else short * long


def _marks(grid: Grid, words: int) -> list[int]:
    """Marks and words of an image in the order of its tokens."""
    rows, columns = grid
    tile = [_WORD] * words
    found = [_BEGIN, *tile, _WHOLE]
    if rows * columns > 1:
        for row in range(rows):
            for column in range(columns):
                found += [*tile, *[_COLUMN] * (column < columns - 1)]
            found += [_ROW] * (row < rows - 1)
    return [*found, _END]


def _side(stated: Mapping[str, Any], default: int) -> int:
    """The side of a tile."""
    size = stated.get("size", default)
    if isinstance(size, Mapping):
        sides = {size[key] for key in ("shortest_edge", "height", "width") if key in size}
        size = sides.pop() if len(sides) == 1 else None
    if type(size) is not int or not 0 < size <= 1 << 14:
        raise UnsupportedModel(f"image processor: size = {stated.get('size')!r}: must be one side")
    if stated.get("do_center_crop", False):
        raise UnsupportedModel("image processor: do_center_crop = True: must be false")
    return size


def _flag(stated: Mapping[str, Any], key: str, default: bool) -> bool:
    value = stated.get(key, default)
    if type(value) is not bool:
        raise UnsupportedModel(f"image processor: {key} = {value!r}: must be true or false")
    return value


def _flag_option(options: Mapping[str, Any], key: str, default: bool) -> bool:
    value = options.get(key, default)
    if type(value) is not bool:
        raise wrong_option(key, value, "true or false")
    return value
