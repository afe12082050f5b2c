"""Images of models that compare them with texts: one image, and no text, is a prompt.

Radford et al. 2021, arXiv:2103.00020; Zhai et al. 2023, arXiv:2303.15343; Tschannen et al. 2025,
arXiv:2502.14786.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.clip import OneSize
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed, part
from headrace_multimodal.images.steps import BILINEAR, HALVES, Numbers, resized
from headrace_multimodal.images.words import Words

PATCH, MOST = "patch_size", "max_num_patches"
_PLACEHOLDER = 0
_STEP = 1e-5


class ClipProcessor(ImageProcessor):
    """An image of one size takes the place of a text."""

    text = ""
    siglip: ClassVar[bool] = False

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self.read_shape()
        self._words = Words(path)

    def read_shape(self) -> None:
        """Read what images become.

        Raises: UnsupportedModel: a setting is not served.
        """
        side = part(self.config, "vision_config").get("image_size", 224)
        self._shape = OneSize(self.stated, side, siglip=self.siglip)

    def find_placeholder(self) -> int:
        """Any token: its vector is not used."""
        return _PLACEHOLDER

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """None: texts may have that token."""
        return ()

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        return ProcessedMedia({PIXEL_VALUES: packed(self._shape(pixels))}, 1)

    def largest_size(self) -> tuple[int, int]:
        return self._shape.size

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """
        Raises:
            RequestError: there is text beside the image, or a second image.
        """
        if len(media) != 1:
            raise RequestError(
                f"multi_modal_data: {len(media)} images: this model embeds one image, or a text",
                param="multi_modal_data",
            )
        if not self._words.special.issuperset(token_ids):
            raise RequestError(
                "prompt: must be empty beside an image, and in a conversation no text may stand beside it: "
                "this model embeds either a text or an image",
                param="prompt",
            )
        return MediaPlacement([self.placeholder_id], [0])


class SiglipProcessor(ClipProcessor):
    """SigLIP's: other numbers where a checkpoint says none."""

    siglip: ClassVar[bool] = True


class Siglip2Processor(SiglipProcessor):
    """SigLIP 2 NaFlex: an image keeps its shape, and has as many patches as the settings allow.
    ``pixel_values`` are [patches, patch * patch * 3], ``spatial_shapes`` [1, 2] int64 rows and columns."""

    def read_shape(self) -> None:
        self._patch, self._most = (
            _number(self.stated, key, default) for key, default in ((PATCH, 16), (MOST, 256))
        )
        if part(self.config, "vision_config").get(PATCH, 16) != self._patch:
            raise UnsupportedModel(
                f"image processor: {PATCH} = {self._patch}: config.json says another for vision_config"
            )
        self._resample = int(self.stated.get("resample", BILINEAR))
        self._numbers = Numbers.of(self.stated, HALVES, HALVES)

    def options(self) -> Sequence[str]:
        return (MOST,)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: the option is no number, or more than the settings allow."""
        most = options.get(MOST, self._most)
        if type(most) is not int or not 0 < most <= self._most:
            raise RequestError(
                f"mm_processor_kwargs.{MOST} = {most!r}: must be a number from 1 to {self._most}",
                param="mm_processor_kwargs",
            )
        rows, columns = patch_grid(pixels.shape[:2], self._patch, most)
        x = self._numbers(
            resized(pixels, rows * self._patch, columns * self._patch, self._resample)
        )
        blocks = x.reshape(3, rows, self._patch, columns, self._patch).transpose(1, 3, 2, 4, 0)
        inputs = {
            PIXEL_VALUES: packed(blocks.reshape(rows * columns, -1)),
            "spatial_shapes": packed(np.array([[rows, columns]], np.int64)),
        }
        return ProcessedMedia(inputs, 1)

    def largest_size(self) -> tuple[int, int]:
        side = math.isqrt(self._most) * self._patch
        return side, side


def patch_grid(image: tuple[int, ...], patch: int, most: int) -> tuple[int, int]:
    """Rows and columns of patches of the largest picture of an image's shape that has at most so many. Sides
    are rounded up to whole patches; the scale is found by halving, to the same step as in the library."""

    def sides(scale: float) -> tuple[int, ...]:
        return tuple(max(1, math.ceil(size * scale / patch)) for size in image)

    low, high = _STEP / 10, 100.0
    while high - low >= _STEP:
        middle = (low + high) / 2
        rows, columns = sides(middle)
        low, high = (middle, high) if rows * columns <= most else (low, middle)
    rows, columns = sides(low)
    return rows, columns


def _number(stated: Mapping[str, Any], key: str, default: int) -> int:
    value = stated.get(key, default)
    if type(value) is not int or not 0 < value <= 1 << 14:
        raise UnsupportedModel(
            f"image processor: {key} = {value!r}: must be a number from 1 to {1 << 14}"
        )
    return value
