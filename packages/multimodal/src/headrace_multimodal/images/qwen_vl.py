"""Qwen2-VL's images: of their own size, in patches that stand in the order in which four become a token.

Wang et al. 2024, arXiv:2409.12191.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import Modality, ProcessedMedia
from headrace_multimodal.embeds_facts import check_facts, fact, missing_fact, wrong_fact
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import (
    PIXEL_VALUES,
    ImageProcessor,
    packed,
    part,
)
from headrace_multimodal.images.steps import BICUBIC, Float, Numbers, resized

GRID = "image_grid_thw"
"""Model input: [3] int64, an image's patches in time, height and width."""
MAX_ASPECT = 200
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280


class QwenVLProcessor(ImageProcessor):
    """See the module."""

    text = "<|vision_start|><|image_pad|><|vision_end|>"
    image_bounds: ClassVar[tuple[int, int]] = (MIN_PIXELS, MAX_PIXELS)
    """Least and most pixels of an image where no settings say them."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        vision, stated = part(config, "vision_config"), self.stated
        self._patch = _size(stated, "patch_size", vision.get("patch_size", 14))
        self._frames = _size(stated, "temporal_patch_size", vision.get("temporal_patch_size", 2))
        self._merge = _size(stated, "merge_size", vision.get("spatial_merge_size", 2))
        size = stated.get("size")
        size = size if isinstance(size, Mapping) else {}
        least = stated.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels")
        most = stated.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels")
        self._least, self._most = (
            int(said or own) for said, own in zip((least, most), self.image_bounds, strict=True)
        )
        self._resample = int(stated.get("resample", BICUBIC))
        self._numbers = Numbers.of(stated)

    def options(self) -> Sequence[str]:
        return ("min_pixels", "max_pixels")

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: an image is 200 times as long as it is wide, or an option is no size."""
        height, width = self.image_size(pixels.shape[:2], self.image_limits(options))
        x = self._numbers(resized(pixels, height, width, self._resample))
        grid = 1, height // self._patch, width // self._patch
        inputs = {
            PIXEL_VALUES: packed(self._patches(x, grid[1], grid[2])),
            GRID: packed(np.array(grid, np.int64)),
        }
        return ProcessedMedia(inputs, math.prod(grid) // self._merge**2)

    def image_limits(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """Least and most pixels of an image, by a request's options."""
        least = pixels_option(options, "min_pixels", self._least, self._most)
        return least, pixels_option(options, "max_pixels", self._most, self._most)

    def image_size(self, size: tuple[int, ...], limits: tuple[int, int]) -> tuple[int, int]:
        """Height and width to which an image is brought.

        Args:
            size: its own height and width.
            limits: least and most pixels.
        """
        height, width = size
        return smart_size(height, width, self._patch * self._merge, *limits)

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
        return ProcessedMedia({GRID: packed(np.array(grid, np.int64))}, math.prod(grid) // merge**2)

    def _patches(self, x: Float, rows: int, columns: int) -> Float:
        """[3, height, width] -> [patches, 3 * frames * patch * patch]; a still image fills its frames."""
        merge, patch = self._merge, self._patch
        shape = (3, rows // merge, merge, patch, columns // merge, merge, patch)
        blocks = x.reshape(shape).transpose(1, 4, 2, 5, 0, 3, 6)
        frames = np.repeat(blocks[:, :, :, :, :, None], self._frames, axis=5)
        return frames.reshape(rows * columns, -1)

    def largest_size(self) -> tuple[int, int]:
        factor = self._patch * self._merge
        return near_square(self.most_of_image() // factor**2, factor)

    def most_of_image(self) -> int:
        """Most pixels of an image."""
        return self._most


def near_square(most: int, factor: int) -> tuple[int, int]:
    """Height and width of as many squares of ``factor`` pixels as ``most`` allows, at least 1, and near a
    square."""
    most = max(1, most)
    rows = range(math.isqrt(most), max(0, math.isqrt(most // MAX_ASPECT)), -1)
    best = max(rows, key=lambda number: number * (most // number))
    return best * factor, most // best * factor


def smart_size(
    height: int,
    width: int,
    factor: int,
    least: int,
    most: int,
    *,
    frames: tuple[int, int] = (1, 1),
    given: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """Height and width near the image's, both multiples of ``factor``, within bounds of pixels.

    Args:
        frames: of a video whose frames share the bounds: their number, and that in whole patches.
        given: height and width before a family's own rule changed them, for messages.

    Raises:
        RequestError: one is more than :data:`MAX_ASPECT` times the other.
    """
    if max(height, width) / min(height, width) > MAX_ASPECT:
        height, width = given or (height, width)
        raise RequestError(
            f"image of {width} x {height} pixels: one side is more than {MAX_ASPECT} times the other",
            param="multi_modal_data",
        )
    sizes = round(height / factor) * factor, round(width / factor) * factor
    count, whole = frames
    if whole * sizes[0] * sizes[1] > most:
        shrink = math.sqrt((count * height * width) / most)
        return _floor(height / shrink, factor), _floor(width / shrink, factor)
    if whole * sizes[0] * sizes[1] < least:
        stretch = math.sqrt(least / (count * height * width))
        return _ceiling(height * stretch, factor), _ceiling(width * stretch, factor)
    return sizes


def _floor(size: float, factor: int) -> int:
    return max(factor, math.floor(size / factor) * factor)


def _ceiling(size: float, factor: int) -> int:
    return math.ceil(size / factor) * factor


def _size(stated: Mapping[str, Any], key: str, default: object) -> int:
    value = stated.get(key, default)
    if type(value) is not int or not 0 < value <= 1 << 10:
        raise UnsupportedModel(f"image processor: {key} = {value!r}: must be a size")
    return value


def pixels_option(options: Mapping[str, Any], name: str, default: int, most: int) -> int:
    """An option's value, or the checkpoint's.

    Args:
        most: of an image the checkpoint's limit, as memory is measured with that.

    Raises: RequestError: it is no number from 1 to that.
    """
    value = options.get(name, default)
    if type(value) is not int or not 0 < value <= most:
        raise RequestError(
            f"mm_processor_kwargs.{name} = {value!r}: must be a whole number of pixels from 1 to {most}",
            param="mm_processor_kwargs",
        )
    return value
