"""Images of StepFun's models: the whole, and crops of a grid whose step the proportions choose.

StepFun 2025, arXiv:2507.19427; StepFun 2026, STEP3-VL-10B.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed, part
from headrace_multimodal.images.steps import BILINEAR, Float, Numbers, resized, two_sizes
from headrace_multimodal.images.vocabulary import special_token_id
from headrace_multimodal.own_ways.resampling import bilinear

_NARROW = 32
"""Pixels of a side below which long images are laid on black squares."""
_LONG, _OBLONG = 4, 1.5
_ROUNDS_UP = 0.2
"""Share of a crop from which an image grows by one, instead of shrinking."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """Sides of squares, in pixels."""

    whole: int
    tile: int
    most: int
    """Larger images are made smaller first."""

    def step(self, height: int, width: int) -> int:
        """Pixels from a crop to the next; 0: there are no crops."""
        short, long = sorted((height, width))
        if long <= self.whole:
            return short if long / short > _OBLONG else 0
        return min(short, self.tile) if long / short > _LONG else self.tile

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of an image that is not too large."""
        scale = self.most / max(height, width)
        return (height, width) if scale >= 1 else (int(height * scale), int(width * scale))


class StepProcessor(ImageProcessor):
    """``pixel_values`` are [3, side, side] of the whole; ``tiles`` [crops, 3, side, side], if any."""

    text = "<im_patch>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        vision = part(config, "vision_config")
        patch = _side(vision, "patch_size", 14)
        whole = _side(vision, "image_size", 728)
        if two_sizes(self.stated.get("size", whole), "size") != (whole, whole):
            raise UnsupportedModel(
                f"image processor: size = {self.stated['size']!r}: must be {whole} x {whole}, as the tower's"
            )
        tile, most = (
            _side(self.stated, "patch_size", 504),
            _side(self.stated, "max_image_size", 3024),
        )
        self.cutting = Cutting(whole, tile, most)
        self.numbers = Numbers.of(self.stated)
        self.counts = tuple(self.num_vectors(side // patch) for side in (tile, whole))
        names = ("patch_start", "patch_end", "patch_newline", "im_start", "im_end")
        self.marks = {name: special_token_id(path, f"<{name}>") for name in names}

    def num_vectors(self, side: int) -> int:
        """Vectors of a picture of so many patches a side."""
        return _behind(_behind(side, 3, 2, 1), 3, 2, 1) ** 2

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """That of a vector, which also stands for an image, and those around them."""
        return (self.placeholder_id, *self.marks.values())

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: nothing is left of the image's short side."""
        pixels = squared(pixels)
        height, width = self.cutting.fitted(*pixels.shape[:2])
        if not height or not width:
            raise RequestError(
                f"image of {pixels.shape[1]} x {pixels.shape[0]} pixels: is too narrow for this model",
                param="multi_modal_data",
            )
        pixels = resized(pixels, height, width, BILINEAR)
        tiles, columns = self._tiles(pixels)
        inputs = {PIXEL_VALUES: packed(self._picture(pixels, self.cutting.whole))}
        if tiles:
            made = [self._picture(tile, self.cutting.tile) for tile in tiles]
            inputs["tiles"] = packed(np.stack(made))
        ids, runs = self._tokens(len(tiles), columns)
        return ProcessedMedia(inputs, len(ids), ids, runs)

    def largest_size(self) -> tuple[int, int]:
        """The tallest image whose crops are small: each is a row of its own."""
        return self.cutting.most, min(_NARROW, self.cutting.tile)

    def _tiles(self, pixels: Pixels) -> tuple[list[Pixels], int]:
        """Crops, row by row, and how many a row has; those that go over an edge are black there."""
        height, width = pixels.shape[:2]
        step = self.cutting.step(height, width)
        if not step:
            return [], 0
        rows, columns = (max(1, whole_steps(side, step)) for side in (height, width))
        high, wide = (
            whole_steps(side, step) * step if side >= step else side for side in (height, width)
        )
        large = np.zeros((rows * step, columns * step, 3), np.uint8)
        large[:high, :wide] = resized(pixels, high, wide, BILINEAR)
        corners = itertools.product(range(0, rows * step, step), range(0, columns * step, step))
        return [large[y : y + step, x : x + step] for y, x in corners], columns

    def _picture(self, pixels: Pixels, side: int) -> Float:
        """[3, side, side]: numbers first, which are then resized."""
        made = bilinear(self.numbers(pixels).transpose(1, 2, 0), side, side)
        return made.transpose(2, 0, 1)

    def _tokens(
        self, tiles: int, columns: int
    ) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Tokens of an image, and the runs that take vectors."""
        ids: list[int] = []
        runs: list[tuple[int, int]] = []
        kinds = [*["patch"] * tiles, "im"]
        for index, kind in enumerate(kinds):
            number = self.counts[kind == "im"]
            runs.append((len(ids) + 1, number))
            ids += [self.marks[f"{kind}_start"], *[self.placeholder_id] * number]
            ids.append(self.marks[f"{kind}_end"])
            if index < tiles - 1 and not (index + 1) % columns:
                ids.append(self.marks["patch_newline"])
        return tuple(ids), tuple(runs)


class Step3Processor(StepProcessor):
    """Step 3's tower has another convolution first."""

    def num_vectors(self, side: int) -> int:
        step = self.config.get("understand_projector_stride", 1)
        if type(step) is not int or step < 1:
            raise UnsupportedModel(
                f"config.json: understand_projector_stride = {step!r}: must be a number of states"
            )
        return _behind(_behind(side, 2, step, 0), 3, 2, 1) ** 2


def squared(pixels: Pixels) -> Pixels:
    """An image; one that is long and narrow in the corner of a black square."""
    height, width = pixels.shape[:2]
    short, long = sorted((height, width))
    if short >= _NARROW or long / short <= _LONG:
        return pixels
    square = np.zeros((long, long, 3), np.uint8)
    square[:height, :width] = pixels
    return square


def whole_steps(side: int, step: int) -> int:
    """Steps that a side is stretched, or shrunk, to; 0: it is shorter than one."""
    if side < step:
        return 0
    return side // step + (side / step - side // step > _ROUNDS_UP)


def _behind(side: int, width: int, step: int, margin: int) -> int:
    """States of a side behind a convolution."""
    return (side + 2 * margin - width) // step + 1


def _side(stated: Mapping[str, Any], key: str, default: int) -> int:
    value = stated.get(key, default)
    if type(value) is not int or not 0 < value <= 1 << 14:
        raise UnsupportedModel(f"image processor: {key} = {value!r}: must be a number of pixels")
    return value
