"""Llama 4's images: laid on a canvas of tiles that suits them, undistorted, with a small picture of the whole
behind them.

Meta 2025, "The Llama 4 herd". Sizes and numbers are those of transformers' processor, down to the types in
which it computes them; pixels are resampled by Pillow, where that takes torchvision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import (
    PIXEL_VALUES,
    ImageProcessor,
    packed,
    part,
    token_id,
)
from headrace_multimodal.images.steps import (
    BILINEAR,
    HALVES,
    Float,
    Numbers,
    cut,
    resized,
    two_sizes,
)
from headrace_multimodal.images.vocabulary import special_token_id

_SIZE, _TILES, _MOST_TILES = 336, 16, 1 << 8
Size = tuple[int, int]
"""Height and width."""
MOST, LARGEST = "max_patches", "resize_to_max_canvas"
_BEGIN, _END, _COLUMN, _ROW = (
    "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>",
)  # fmt: skip


class Llama4Processor(ImageProcessor):
    """See the module. ``pixel_values`` are [tiles, 3, side, side]."""

    text = "<|image|>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        stated, vision = self.stated, part(config, "vision_config")
        self._side = _square(stated, vision)
        for key in ("do_resize", "do_rescale", "do_normalize"):
            if not stated.get(key, True):
                raise UnsupportedModel(f"image processor: {key} = {stated[key]!r}: must be true")
        self._per_tile = _vectors(self._side, vision)
        self._most = stated.get(MOST, _TILES)
        if type(self._most) is not int or not 0 < self._most <= _MOST_TILES:
            raise UnsupportedModel(
                f"image processor: {MOST} = {self._most!r}: must be a number of tiles"
            )
        self._to_largest = bool(stated.get(LARGEST, False))
        self._resample = int(stated.get("resample", BILINEAR))
        self._numbers = _table(Numbers.of(stated, HALVES, HALVES))
        self._patch = token_id(config, "image_token_index", "image_token_id")
        self._begin, self._end, self._column, self._row = (
            special_token_id(path, name) for name in (_BEGIN, _END, _COLUMN, _ROW)
        )
        self._tokens = lru_cache(maxsize=64)(self._expanded)

    def find_placeholder(self) -> int:
        """The token of the whole, which prompts have for an image."""
        return special_token_id(self.path, self.text)

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """The token of the whole, and that of a vector."""
        return (self.placeholder_id, self._patch)

    def options(self) -> Sequence[str]:
        return (MOST, LARGEST)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: an option is of another type, or allows more tiles than the model's
        settings."""
        most, to_largest = self._chosen(options)
        side = self._side
        canvas = canvas_of(pixels.shape[:2], canvases(most, side), to_largest)
        grid = canvas[0] // side, canvas[1] // side
        tiles = cut(self._laid(pixels, canvas, to_largest), side)
        if len(tiles) > 1:
            tiles.append(resized(pixels, side, side, self._resample))
        ids, runs = self._tokens(grid)
        values = np.stack([self._value(tile) for tile in tiles])
        return ProcessedMedia({PIXEL_VALUES: packed(values)}, len(ids), ids, runs)

    def largest_size(self) -> Size:
        """As many tiles as are cut, side by side."""
        return self._side, self._side * self._most

    def _chosen(self, options: Mapping[str, Any]) -> tuple[int, bool]:
        """Most tiles, and whether images grow as far as they can."""
        most, largest = options.get(MOST, self._most), options.get(LARGEST, self._to_largest)
        if type(most) is not int or not 0 < most <= self._most:
            raise _wrong(MOST, most, f"a number of tiles from 1 to {self._most}")
        if type(largest) is not bool:
            raise _wrong(LARGEST, largest, "true or false")
        return most, largest

    def _laid(self, pixels: Pixels, canvas: Size, to_largest: bool) -> Pixels:
        """The image in the upper left of a canvas, which is black."""
        own = pixels.shape[0], pixels.shape[1]
        height, width = fitted(own, canvas, None if to_largest else self._side)
        whole = np.zeros((*canvas, 3), np.uint8)
        whole[:height, :width] = resized(pixels, height, width, self._resample)
        return whole

    def _value(self, tile: Pixels) -> Float:
        """[side, side, 3] uint8 -> [3, side, side] float32."""
        return np.stack([self._numbers[channel][tile[..., channel]] for channel in range(3)])

    def _expanded(self, grid: Size) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Tokens of an image in so many rows and columns of tiles, and the runs that take vectors."""
        found, runs = [self._begin], []
        rows, columns = grid if grid != (1, 1) else (0, 0)
        between = ([self._column] * (columns - 1) + [self._row]) * rows
        for behind in (*between, self._end):
            found += [self.placeholder_id] * (behind == self._end)
            runs.append((len(found), self._per_tile))
            found += [*[self._patch] * self._per_tile, behind]
        return tuple(found), tuple(runs)


@lru_cache(maxsize=16)
def canvases(most: int, side: int) -> tuple[Size, ...]:
    """Sizes of all grids of up to so many square tiles."""
    numbers = range(1, most + 1)
    return tuple((r * side, c * side) for r in numbers for c in numbers if r * c <= most)


def canvas_of(image: tuple[int, ...], among: Sequence[Size], to_largest: bool) -> Size:
    """The canvas on which an image need not shrink and grows least (or most), or shrinks least; among equals
    the smallest.

    Args:
        image: height and width.
    """
    single = np.float32
    sizes = np.array(among, single)
    scales = (sizes / np.array(image[:2], single)).min(axis=1)
    holding = scales[scales >= 1]
    if holding.size:
        chosen = holding.max() if to_largest else holding.min()
    else:
        chosen = scales.max()
    equal = [size for size, scale in zip(among, scales, strict=True) if scale == chosen]
    return min(equal, key=lambda size: size[0] * size[1])


def fitted(image: Size, canvas: Size, grown: int | None) -> Size:
    """The largest size with the image's proportions that fits into a canvas.

    Args:
        grown: an image grows no further than to this side; None: as far as the canvas lets it.
    """
    sides, ratios = [], []
    for own, most in zip(image, canvas, strict=True):
        wished = most if grown is None else max(own, grown)
        is_single = grown is None or most < wished
        sides.append(min(wished, most))
        ratios.append(np.float32(most) / np.float32(own) if is_single else sides[-1] / own)
    by_height, by_width = ratios
    if _less(by_width, by_height):
        return max(1, min(_product(image[0], by_width), sides[0])), max(1, sides[1])
    return max(1, sides[0]), max(1, min(_product(image[1], by_height), sides[1]))


def _less(first: Any, second: Any) -> bool:
    """In single precision, if one of them is."""
    if isinstance(first, np.float32) or isinstance(second, np.float32):
        return bool(np.float32(first) < np.float32(second))
    return bool(first < second)


def _product(side: int, ratio: Any) -> int:
    """A side of the image by a ratio, in its precision."""
    return math.floor(
        float(np.float32(side) * ratio if isinstance(ratio, np.float32) else side * ratio)
    )


def _table(numbers: Numbers) -> Float:
    """[3, 256] float32: a byte's value in each channel, computed in bfloat16 as the models were trained."""
    assert numbers.factor is not None
    assert numbers.mean is not None
    assert numbers.std is not None
    scaled = _bfloat16(np.arange(256, dtype=np.float32) * np.float32(numbers.factor))
    mean, std = (_bfloat16(np.array(x, np.float32))[:, None] for x in (numbers.mean, numbers.std))
    return _bfloat16(_bfloat16(scaled - mean) / std)


def _bfloat16(x: Float) -> Float:
    """Rounded to the nearest number of bfloat16, of two to the even one; stays float32."""
    bits: npt.NDArray[np.uint32] = np.ascontiguousarray(x, np.float32).view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def _square(stated: Mapping[str, Any], vision: Mapping[str, Any]) -> int:
    """The side of a tile."""
    height, width = two_sizes(stated.get("size", _SIZE), "size")
    known = vision.get("image_size", 448)
    if height != width or height != known:
        raise UnsupportedModel(
            f"image processor: size = {(height, width)}: the tower takes images of {known!r}"
        )
    return height


def _vectors(side: int, vision: Mapping[str, Any]) -> int:
    """Vectors of a tile."""
    patch, ratio = vision.get("patch_size", 14), vision.get("pixel_shuffle_ratio", 0.5)
    if type(patch) is not int or patch < 1 or type(ratio) not in (int, float) or not 0 < ratio <= 1:
        raise UnsupportedModel(
            f"config.json: vision_config: patch_size = {patch!r}, pixel_shuffle_ratio = {ratio!r}: must be "
            "pixels, and a number up to 1"
        )
    return int((side // patch) ** 2 // round(1 / ratio**2))


def _wrong(name: str, value: object, accepted: str) -> RequestError:
    return RequestError(
        f"mm_processor_kwargs.{name} = {value!r}: must be {accepted}", param="mm_processor_kwargs"
    )
