"""Cubic resampling as OpenCV does it: every number from its sixteen neighbours, also where an image shrinks,
in single precision, without rounding to bytes.

Keys 1981, "Cubic convolution interpolation for digital image processing", with a = -3/4.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.steps import Float

_A = np.float32(-0.75)


def cubic(pixels: Pixels, height: int, width: int) -> Float:
    """[H, W, 3] uint8 -> [height, width, 3] float32, which may go below 0 and beyond 255."""
    x = pixels.astype(np.float32)
    if pixels.shape[:2] == (height, width):
        return x
    across, along = _neighbours(pixels.shape[1], width)
    down, weights = _neighbours(pixels.shape[0], height)
    rows = np.zeros((pixels.shape[0], width, 3), np.float32)
    made = np.zeros((height, width, 3), np.float32)
    for i in range(4):
        rows += x[:, across[:, i]] * along[None, :, i, None]
    for i in range(4):
        made += rows[down[:, i]] * weights[:, i, None, None]
    return made


def _neighbours(before: int, after: int) -> tuple[npt.NDArray[np.int64], Float]:
    """Of each new place along a side, four old ones and their weights, [after, 4] both; beyond the ends are
    the last ones again."""
    places = (np.arange(after) + 0.5) * (before / after) - 0.5
    first = np.floor(places).astype(np.int64)
    x = (places - first).astype(np.float32)
    one = np.float32(1)
    weights = np.empty((after, 4), np.float32)
    weights[:, 0] = ((_A * (x + one) - 5 * _A) * (x + one) + 8 * _A) * (x + one) - 4 * _A
    weights[:, 1] = ((_A + 2) * x - (_A + 3)) * x * x + one
    weights[:, 2] = ((_A + 2) * (one - x) - (_A + 3)) * (one - x) * (one - x) + one
    weights[:, 3] = one - weights[:, 0] - weights[:, 1] - weights[:, 2]
    return np.clip(first[:, None] + np.arange(-1, 3), 0, before - 1), weights
