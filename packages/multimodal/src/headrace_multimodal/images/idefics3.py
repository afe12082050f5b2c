"""Images of Idefics3 and SmolVLM: as many square tiles as they are large, and a small picture of the whole,
each behind a token that says where it lies.

Laurençon et al. 2024, arXiv:2408.12637; Marafioti et al. 2025, arXiv:2504.05299.
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
from headrace_multimodal.images.steps import HALVES, LANCZOS, Numbers, cut, resized
from headrace_multimodal.images.words import Words, widened

MAX_SIDE = 4096
SPLITS = "do_image_splitting"
_AROUND, _IMAGE, _WHOLE = "<fake_token_around_image>", "<image>", "<global-img>"


class Idefics3Processor(ImageProcessor):
    """See the module. ``pixel_values`` are [tiles, 3, side, side], the whole last."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        vision, stated = part(config, "vision_config"), self.stated
        self._longest = longest_edge(stated, "size", 4 * 364)
        self._tile = longest_edge(stated, "max_image_size", 364)
        patch, factor = vision.get("patch_size", 32), config.get("scale_factor", 2)
        if not all(type(x) is int and x > 0 for x in (patch, factor)):
            raise UnsupportedModel(
                f"config.json: vision_config.patch_size = {patch!r}, scale_factor = {factor!r}: must be sizes"
            )
        if not self._tile // patch or self._tile // patch % factor:
            raise UnsupportedModel(
                f"image processor: max_image_size = {self._tile}: scale_factor = {factor} must divide its "
                f"patches of {patch} pixels"
            )
        if not stated.get("do_resize", True):
            raise UnsupportedModel("image processor: do_resize = False: must be true")
        self._splits = bool(stated.get(SPLITS, True))
        self._resample = int(stated.get("resample", LANCZOS))
        self._numbers = Numbers.of(stated, HALVES, HALVES)
        self._per_tile = (self._tile // patch // factor) ** 2
        self._words = Words(path)
        self._words.check(**{_AROUND: None, _IMAGE: self.placeholder_id})
        self._tokens = lru_cache(maxsize=256)(self._expanded)

    def options(self) -> Sequence[str]:
        return (SPLITS,)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: an option is not true or false."""
        splits = options.get(SPLITS, self._splits)
        if not isinstance(splits, bool):
            raise RequestError(
                f"mm_processor_kwargs.{SPLITS} = {splits!r}: must be true or false",
                param="mm_processor_kwargs",
            )
        edge = self._tile
        pixels = resized(pixels, *bounded(pixels.shape[:2], self._longest), self._resample)
        rows = columns = 0
        if not splits:
            tiles = [resized(pixels, edge, edge, self._resample)]
        else:
            size = whole_tiles(pixels.shape[:2], edge)
            pixels = resized(pixels, *size, self._resample)
            tiles = cut(pixels, edge)
            if len(tiles) > 1:
                rows, columns = size[0] // edge, size[1] // edge
                tiles.append(resized(pixels, edge, edge, self._resample))
        ids, runs = self._tokens(rows, columns)
        values = np.stack([self._numbers(tile) for tile in tiles])
        return ProcessedMedia({PIXEL_VALUES: packed(values)}, len(ids), ids, runs)

    def _expanded(
        self, rows: int, columns: int
    ) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Tokens of an image of so many tiles, and the runs that take vectors."""
        lines = [
            "".join(
                f"{_AROUND}<row_{row}_col_{column}>{_IMAGE}" for column in range(1, columns + 1)
            )
            for row in range(1, rows + 1)
        ]
        text = "".join(f"{line}\n" for line in lines) + ("\n" if lines else "")
        text += f"{_AROUND}{_WHOLE}{_IMAGE}{_AROUND}"
        return widened(self._words.ids(text), self.placeholder_id, self._per_tile)

    def largest_size(self) -> tuple[int, int]:
        side = min(self._longest, MAX_SIDE)
        return side, side


def bounded(image: tuple[int, ...], longest: int) -> tuple[int, int]:
    """Height and width with the longer side of that length, or of :data:`MAX_SIDE` at most; the other is
    even."""
    height, width = image
    ratio = width / height
    if width >= height:
        height, width = _even(int(longest / ratio)), longest
    else:
        height, width = longest, _even(int(longest * ratio))
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > MAX_SIDE:
        height, width = int(MAX_SIDE / ratio), MAX_SIDE
    elif height > width and height > MAX_SIDE:
        height, width = MAX_SIDE, int(MAX_SIDE * ratio)
    return max(height, 1), max(width, 1)


def whole_tiles(image: tuple[int, ...], edge: int) -> tuple[int, int]:
    """Height and width in whole tiles: the longer side rounded up, the other as it follows, rounded up."""
    height, width = image
    ratio = width / height
    if width >= height:
        width = _up(width, edge)
        return _up(int(width / ratio), edge), width
    height = _up(height, edge)
    return height, _up(int(height * ratio), edge)


def _even(size: int) -> int:
    return size + size % 2


def _up(size: int, edge: int) -> int:
    return math.ceil(size / edge) * edge


def longest_edge(stated: Mapping[str, Any], key: str, default: int) -> int:
    """The longest edge that a setting names.

    Raises: UnsupportedModel: it names none.
    """
    value = stated.get(key, {"longest_edge": default})
    edge = value.get("longest_edge") if isinstance(value, Mapping) else None
    if type(edge) is not int or not 0 < edge <= 1 << 14:
        raise UnsupportedModel(f"image processor: {key} = {value!r}: must have a longest_edge")
    return edge
