"""Images resized in floating point, as torch resizes tensors; Pillow rounds to bytes."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float32]


def bilinear(image: Float, height: int, width: int) -> Float:
    """[H, W, C] float32 -> [height, width, C]: each pixel is a mean of those that it covers, whose weights
    fall off linearly (``antialias=True``)."""
    for axis, size in enumerate((height, width)):
        if image.shape[axis] != size:
            image = _along(image, size, axis)
    return image


def _along(image: Float, size: int, axis: int) -> Float:
    """The same along one axis."""
    places, weights = _taps(image.shape[axis], size)
    shape = [1] * image.ndim
    shape[axis] = size
    found: Float | None = None
    for place, weight in zip(places.T, weights.T, strict=True):
        part = np.take(image, place, axis) * weight.reshape(shape)
        found = part if found is None else found + part
    assert found is not None
    return found


def _taps(before: int, after: int) -> tuple[npt.NDArray[np.int64], Float]:
    """[after, taps]: pixels that each new one is made of, and their shares; in single precision, as there."""
    single, half = np.float32, np.float32(0.5)
    scale = single(before) / single(after)
    reach = max(scale, single(1))
    centres = (np.float64(scale) * (np.arange(after) + 0.5)).astype(single)
    first = np.maximum((centres - reach + half).astype(np.int64), 0)
    ends = np.minimum((centres + reach + half).astype(np.int64), before)
    places = first[:, None] + np.arange(math.ceil(reach) * 2 + 1)
    away = (places.astype(single) - centres[:, None] + half) * (single(1) / reach)
    shares = np.maximum(single(1) - np.abs(away), single(0)) * (places < ends[:, None])
    shares /= shares.sum(axis=1, keepdims=True)
    return np.minimum(places, before - 1), shares.astype(single)
