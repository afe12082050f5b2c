"""Images of Kimi-VL and Kimi K2.5: of their own size, made smaller if they have too many patches, with a
black edge to the right and below up to whole squares of patches.

Kimi Team 2025, arXiv:2504.07491; Kimi Team 2026, arXiv:2602.02276.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

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
from headrace_multimodal.images.steps import CLIP_MEAN, CLIP_STD, HALVES, Float, Numbers, resized

SIZES = "image_grid_hws"
"""Model input: [2] int64, rows and columns of an image's patches."""
_SIDE = 512
"""Patches of a side, at most."""
_MOST = 1 << 20
Size = tuple[int, int]
"""Height and width."""


class KimiVLProcessor(ImageProcessor):
    """See the module. ``pixel_values`` are [patches, 3 * patch * patch], row by row."""

    text = "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"
    limit_keys: ClassVar[tuple[str, ...]] = ("in_token_limit",)
    """Settings that say the most patches of an image; the first that is there counts."""
    limit: ClassVar[int] = 4096
    colours: ClassVar[tuple[tuple[float, ...], tuple[float, ...]]] = (CLIP_MEAN, CLIP_STD)
    """Patches, and mean and deviation, where no settings say them."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        stated = self.settings()
        vision = part(config, "vision_config")
        self._patch = whole_number(stated, ("patch_size",), vision.get("patch_size", 14))
        self._merge = square_of(stated, vision)
        self._most = whole_number(stated, self.limit_keys, self.limit)
        self._numbers = Numbers.of(stated, *self.colours)
        self.check(stated)

    def settings(self) -> Mapping[str, Any]:
        """The stated settings of images."""
        return self.stated

    def check(self, stated: Mapping[str, Any]) -> None:
        """Raises: UnsupportedModel: images are cut, not filled up."""
        if not stated.get("pad_input", False):
            raise UnsupportedModel("image processor: pad_input = False: must be true")

    def find_placeholder(self) -> int:
        return token_id(self.config, "media_placeholder_token_id", "image_token_id")

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: the image has too many patches on a side."""
        whole = self.fitted(pixels, self.image_size((pixels.shape[0], pixels.shape[1])))
        size = whole.shape[0] // self._patch, whole.shape[1] // self._patch
        inputs = {
            PIXEL_VALUES: packed(self._patches(self._numbers(whole))),
            SIZES: packed(np.array(size, np.int64)),
        }
        return ProcessedMedia(inputs, math.prod(size) // self._merge**2)

    def fitted(self, pixels: Pixels, size: Size) -> Pixels:
        """An image of a size, with its edge."""
        height, width = size
        whole = np.zeros((self.up(height), self.up(width), 3), np.uint8)
        whole[:height, :width] = resized(pixels, height, width)
        return whole

    def up(self, length: int) -> int:
        """The next multiple of a token's side."""
        unit = self._patch * self._merge
        return -(-length // unit) * unit

    def image_size(self, size: Size) -> Size:
        """Height and width to which an image is brought, before it gets its edge.

        Raises: RequestError: it has too many patches on a side.
        """
        rows, columns = (length // self._patch for length in size)
        scale = math.sqrt(self._most / (rows * columns)) if rows * columns > self._most else 1.0
        height, width = (int(length * scale) for length in size)
        longest = max(self.up(height), self.up(width)) // self._patch
        if longest >= _SIDE or not height or not width:
            raise RequestError(
                f"image of {size[1]} x {size[0]} pixels: a side would have more than {_SIDE - 1} patches of "
                f"{self._patch} pixels, or none: the image is too narrow",
                param="multi_modal_data",
            )
        return height, width

    def _patches(self, x: Float) -> Float:
        """[3, height, width] -> [patches, 3 * patch * patch]."""
        patch, (_, height, width) = self._patch, x.shape
        cut = x.reshape(3, height // patch, patch, width // patch, patch)
        return cut.transpose(1, 3, 0, 2, 4).reshape(-1, 3 * patch**2)

    def largest_size(self) -> Size:
        return self.largest_within(self._most, self.longest_side(), self._num_tokens)

    def largest_within(self, most: int, longest: int, num_tokens: Callable[[Size], int]) -> Size:
        """Of images with about as many patches as are taken, one whose edge adds most.

        Args:
            most: patches.
            longest: pixels of a side.
            num_tokens: size -> tokens.
        """
        patch = self._patch
        sizes = [
            ((rows + 1) * patch - 1, min((most // rows + more) * patch - 1, longest))
            for rows in range(1, _SIDE)
            for more in (1, 2)
        ]
        return max(sizes, key=num_tokens)

    def longest_side(self) -> int:
        """Pixels of a side that is taken as it is."""
        return (_SIDE - 1) // self._merge * self._merge * self._patch

    def _num_tokens(self, size: Size) -> int:
        """Tokens of an image; 0: it is not taken."""
        unit = self._patch * self._merge
        try:
            return math.prod(self.up(length) // unit for length in self.image_size(size))
        except RequestError:
            return 0

    def sizeless(self, num_vectors: int) -> ProcessedMedia:
        """An image's tokens are nothing but its vectors."""
        return ProcessedMedia({}, num_vectors)


class KimiK25Processor(KimiVLProcessor):
    """Sides are bounded before the edge, and by making images smaller."""

    text = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
    limit_keys = ("in_patch_limit", "max_patches")
    limit = 16_384
    colours = (HALVES, HALVES)

    def settings(self) -> Mapping[str, Any]:
        return own_settings(self.stated)

    def check(self, stated: Mapping[str, Any]) -> None:
        """Raises: UnsupportedModel: all images have as many tokens."""
        if stated.get("fixed_output_tokens") is not None:
            raise UnsupportedModel(
                f"image processor: fixed_output_tokens = {stated['fixed_output_tokens']!r}: must be null"
            )
        self._side = side_of(stated)

    def image_size(self, size: Size) -> Size:
        return self.bounded(size, self._most, self._side)

    def bounded(self, size: Size, most: int, side: int) -> Size:
        """Height and width of at most so many patches, together and on a side."""
        patch, longest = self._patch, side * self._patch
        count = math.prod(max(1, length // patch) for length in size)
        scale = min(1.0, math.sqrt(most / count), *(longest / length for length in size))
        height, width = (min(max(1, int(length * scale)), longest) for length in size)
        return height, width

    def longest_side(self) -> int:
        return self._side * self._patch


def own_settings(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """Kimi K2.5's settings; published checkpoints have them in an object of their own."""
    return part(stated, "media_proc_cfg") or stated


def side_of(stated: Mapping[str, Any]) -> int:
    """Most patches of a side of Kimi K2.5's images."""
    size = stated.get("size")
    stated = {**stated, **(size if isinstance(size, Mapping) else {})}
    return whole_number(stated, ("patch_limit_on_one_side", "max_height"), _SIDE)


def square_of(stated: Mapping[str, Any], vision: Mapping[str, Any]) -> int:
    """Patches of a side of the square that becomes a token."""
    for found in (
        stated.get("merge_kernel_size"),
        stated.get("merge_size"),
        vision.get("merge_kernel_size"),
    ):
        if found is not None:
            side = found[0] if isinstance(found, list) and len(set(found)) == 1 else found
            return whole_number({"merge_kernel_size": side}, ("merge_kernel_size",), 2)
    return 2


def whole_number(stated: Mapping[str, Any], keys: tuple[str, ...], default: object) -> int:
    """A setting by the first of some keys that has a value.

    Raises: UnsupportedModel: it is no number above 0.
    """
    key = next((key for key in keys if stated.get(key) is not None), keys[0])
    value = stated.get(key, default)
    if type(value) is not int or not 0 < value <= _MOST:
        raise UnsupportedModel(
            f"image processor: {key} = {value!r}: must be a number from 1 to {_MOST}"
        )
    return value
