"""Isaac's images: of about their own size, in whole squares of patches, within bounds of the patches' number.

Perceptron 2025, Isaac 0.1 and 0.2. Bytes are resized as torch resizes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.embeds_facts import check_facts, fact, missing_fact, wrong_fact
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed, part
from headrace_multimodal.images.qwen_vl import GRID
from headrace_multimodal.images.steps import HALVES, Numbers
from headrace_multimodal.images.words import Words
from headrace_multimodal.own_ways.resampling import stretched_bytes
from headrace_multimodal.placeholders import expanded

_MARK = -1
"""Stands for an image in a prompt's tokens: its text need be no token."""
_MOST_PIXELS = 60_000_000
_TOLERANCE = 1e-5
"""Of a search for a scale."""
_LARGEST_SCALE = 100.0


class IsaacProcessor(ImageProcessor):
    """``pixel_values`` are [patches, patch * patch * 3], row by row, ``image_grid_thw`` [3] int64: 1, rows,
    columns."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        text = config.get("vision_token", "<image>")
        if not isinstance(text, str) or not text:
            raise UnsupportedModel(f"config.json: vision_token = {text!r}: must be a text")
        self.text, self._words = text, Words(path)
        super().__init__(config, path)
        vision = part(config, "vision_config")
        self._patch = self._number(
            "patch_size", "vision_patch_size", _int(vision, "patch_size", 16)
        )
        self._merge = self._number("pixel_shuffle_scale", "pixel_shuffle_scale", 1)
        self._most = self._number("max_num_patches", "vision_max_num_patches", 256)
        self._least = self._number("min_num_patches", "vision_min_num_patches", 1)
        self._check(vision)
        self._numbers = Numbers.of(self.stated, HALVES, HALVES)

    def find_placeholder(self) -> int:
        """The first token of the text that stands for an image; it also stands for each vector."""
        return self._words.ids(self.text)[0]

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """That token, if the text is no more than it."""
        return (self.placeholder_id,) if len(self._words.ids(self.text)) == 1 else ()

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: the image has too many pixels."""
        height, width = pixels.shape[:2]
        if height * width > _MOST_PIXELS:
            raise RequestError(
                f"image of {width} x {height} pixels: this model takes at most {_MOST_PIXELS} pixels",
                param="multi_modal_data",
            )
        unit = self._patch * self._merge
        size = fitted(
            (height, width), unit, (self._least * self._patch**2, self._most * self._patch**2)
        )
        rows, columns = (side // self._patch for side in size)
        x = self._numbers(stretched_bytes(pixels, *size)).transpose(1, 2, 0)
        cut = x.reshape(rows, self._patch, columns, self._patch, 3).transpose(0, 2, 1, 3, 4)
        inputs = {
            PIXEL_VALUES: packed(cut.reshape(rows * columns, -1)),
            GRID: packed(np.array((1, rows, columns), np.int64)),
        }
        return self._made(inputs, rows * columns)

    def embedded(
        self, modality: Modality, num_vectors: int, facts: Mapping[str, Any]
    ) -> ProcessedMedia:
        """An image of the stated grid; see :class:`headrace_core.multimodal.TakesEmbeds`."""
        check_facts(facts, (GRID,))
        if GRID not in facts:
            raise missing_fact(GRID, "an image's patches in time (1), height and width")
        grid, merge = fact(facts, GRID, 3), self._merge
        if grid[0] != 1 or grid[1] % merge or grid[2] % merge:
            raise wrong_fact(GRID, list(grid), f"[1, height, width] in multiples of {merge}")
        return self._made({GRID: packed(np.array(grid, np.int64))}, math.prod(grid))

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Texts around images become tokens one by one."""
        marked = self._words.replaced(token_ids, self.text, _MARK)
        return expanded(marked if media else token_ids, media, _MARK)

    def largest_size(self) -> tuple[int, int]:
        """One row of squares."""
        unit = self._patch * self._merge
        return unit, self._most // self._merge**2 * unit

    def _made(self, inputs: Mapping[str, Any], patches: int) -> ProcessedMedia:
        number = patches // self._merge**2
        return ProcessedMedia(inputs, number, (self.placeholder_id,) * number)

    def _number(self, key: str, in_config: str, default: int) -> int:
        """A setting of the processor's own file, or of ``config.json``, as in the first checkpoints."""
        stated = (
            self.stated if self.stated.get(key) is not None else {key: self.config.get(in_config)}
        )
        return _int(stated, key, default)

    def _check(self, vision: Mapping[str, Any]) -> None:
        for key, tower, value in (
            ("patch_size", "patch_size", self._patch),
            ("pixel_shuffle_scale", "pixel_shuffle_scale_factor", self._merge),
        ):
            if vision.get(tower, value) != value:
                raise UnsupportedModel(
                    f"image processor: {key} = {value}: vision_config.{tower} = {vision[tower]!r}"
                )
        if self._most < max(self._least, self._merge**2):
            raise UnsupportedModel(
                f"image processor: max_num_patches = {self._most}: must be at least min_num_patches = "
                f"{self._least} and a square of {self._merge} x {self._merge}"
            )


def fitted(size: tuple[int, int], unit: int, bounds: tuple[int, int]) -> tuple[int, int]:
    """Height and width in whole units, as near the image's as bounds of pixels allow.

    Args:
        size: height and width of the image.
        unit: pixels of a square's side.
        bounds: least and most pixels.
    """
    least, most = bounds
    whole = _scaled(size, 1.0, unit)
    if math.prod(whole) < least:
        low, high = 1.0, _LARGEST_SCALE
        while high - low >= _TOLERANCE:
            middle = (low + high) / 2
            is_enough = math.prod(_scaled(size, middle, unit)) >= least
            low, high = (low, middle) if is_enough else (middle, high)
        return _scaled(size, high, unit)
    if math.prod(whole) <= most:
        return whole
    low, high = _TOLERANCE / 10, 1.0
    while high - low >= _TOLERANCE:
        middle = (low + high) / 2
        fits = math.prod(_scaled(size, middle, unit)) <= most
        low, high = (middle, high) if fits else (low, middle)
    return _scaled(size, low, unit)


def _scaled(size: tuple[int, int], scale: float, unit: int) -> tuple[int, int]:
    height, width = (max(unit, math.ceil(scale * side / unit) * unit) for side in size)
    return height, width


def _int(stated: Mapping[str, Any], key: str, default: int) -> int:
    value = stated.get(key)
    value = default if value is None else value
    if type(value) is not int or not 0 < value <= 1 << 16:
        raise UnsupportedModel(
            f"image processor: {key} = {value!r}: must be a number from 1 to {1 << 16}"
        )
    return value
