"""Steps from pixels to a model's numbers, with the numerics of Hugging Face's image processors on Pillow.

Letters: H height, W width.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from headrace_core.errors import UnsupportedModel
from headrace_multimodal.images.pixels import Pixels

Float = npt.NDArray[np.float32]
BILINEAR, BICUBIC, LANCZOS = 2, 3, 1
"""Numbers of Pillow's filters, as configs have them."""
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALVES = (0.5, 0.5, 0.5)


def resized(pixels: Pixels, height: int, width: int, resample: int = BICUBIC) -> Pixels:
    """[height, width, 3] uint8, by one of Pillow's filters."""
    if pixels.shape[:2] == (height, width):
        return pixels
    image = Image.fromarray(pixels)
    return np.asarray(image.resize((width, height), Image.Resampling(resample)))


def centre(pixels: Pixels, height: int, width: int) -> Pixels:
    """The middle [height, width, 3]; what lies outside of the image is black."""
    own_height, own_width = pixels.shape[:2]
    top, left = (own_height - height) // 2, (own_width - width) // 2
    if top >= 0 and left >= 0:
        return pixels[top : top + height, left : left + width]
    whole = np.zeros((max(height, own_height), max(width, own_width), 3), pixels.dtype)
    at = -(-(whole.shape[0] - own_height) // 2), -(-(whole.shape[1] - own_width) // 2)
    whole[at[0] : at[0] + own_height, at[1] : at[1] + own_width] = pixels
    top, left = top + at[0], left + at[1]
    top, left = max(0, top), max(0, left)
    return whole[top : top + height, left : left + width]


def cut(pixels: Pixels, tile: int) -> list[Pixels]:
    """Squares of an image, row by row; those at its right and lower edge may be smaller."""
    height, width = pixels.shape[:2]
    corners = itertools.product(range(0, height, tile), range(0, width, tile))
    return [pixels[top : top + tile, left : left + tile] for top, left in corners]


@dataclass(frozen=True, slots=True)
class Numbers:
    """From bytes to the numbers that a tower takes: ``(x * factor - mean) / std``."""

    factor: float | None = 1 / 255
    """None: bytes stay what they are."""
    mean: tuple[float, ...] | None = CLIP_MEAN
    std: tuple[float, ...] | None = CLIP_STD
    """None, both: nothing is subtracted."""

    @classmethod
    def of(
        cls,
        stated: Mapping[str, Any],
        mean: Sequence[float] = CLIP_MEAN,
        std: Sequence[float] = CLIP_STD,
    ) -> Numbers:
        """By a processor's settings.

        Args:
            mean, std: of settings that leave them out.

        Raises:
            UnsupportedModel: they are no three numbers.
        """
        factor = stated.get("rescale_factor", 1 / 255) if stated.get("do_rescale", True) else None
        if not stated.get("do_normalize", True):
            return cls(factor, None, None)
        found = []
        for key, default in (("image_mean", mean), ("image_std", std)):
            value = stated.get(key, default)
            if not (
                isinstance(value, Sequence)
                and len(value) == 3
                and all(isinstance(x, int | float) for x in value)
            ):
                raise UnsupportedModel(f"image processor: {key} = {value!r}: must be three numbers")
            found.append(tuple(map(float, value)))
        return cls(factor, *found)

    def __call__(self, pixels: Pixels) -> Float:
        """[H, W, 3] uint8 -> [3, H, W] float32."""
        x: npt.NDArray[Any] = pixels.transpose(2, 0, 1)
        if self.factor is not None:
            x = (x.astype(np.float64) * self.factor).astype(np.float32)
        x = x.astype(np.float32, copy=False)
        if self.mean is not None:
            shape = (3, 1, 1)
            x = (x - np.array(self.mean, x.dtype).reshape(shape)) / np.array(
                self.std, x.dtype
            ).reshape(shape)
        return np.ascontiguousarray(x, np.float32)


def two_sizes(stated: object, what: str) -> tuple[int, int]:
    """(height, width) of a setting: an object of both, or one number.

    Raises: UnsupportedModel: it is neither.
    """
    if isinstance(stated, Mapping):
        pair = stated.get("height"), stated.get("width")
    else:
        pair = stated, stated
    if not all(type(size) is int and 0 < size <= 1 << 14 for size in pair):
        raise UnsupportedModel(f"image processor: {what} = {stated!r}: must be height and width")
    return pair  # type: ignore[return-value]
