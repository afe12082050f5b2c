"""Images resized in floating point, as torch resizes tensors; Pillow rounds to bytes."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from headrace_multimodal.images.pixels import Pixels

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


def stretched(pixels: Pixels, height: int, width: int) -> Pixels:
    """[H, W, C] uint8 -> [height, width, C]: each pixel by the four around its place (``antialias=False``),
    rounded to bytes."""
    image = pixels.astype(np.float32)
    (top, bottom, down), (left, right, across) = (
        _between(before, after)
        for before, after in zip(pixels.shape[:2], (height, width), strict=True)
    )
    one, across, down = np.float32(1), across[:, None], down[:, None, None]
    rows = image[:, left] * (one - across) + image[:, right] * across
    found = rows[top] * (one - down) + rows[bottom] * down
    whole: Pixels = np.rint(found).clip(0, 255).astype(np.uint8)
    return whole


def _between(before: int, after: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Float]:
    """[after] each: pixels on both sides of each new one, and the share of the second; in single precision,
    as there."""
    single = np.float32
    scale = single(before) / single(after)
    places = (np.float64(scale) * (np.arange(after) + 0.5) - 0.5).astype(single).clip(0)
    first = np.minimum(places.astype(np.int64), before - 1)
    share = np.clip(places - first.astype(single), 0, 1).astype(single)
    return first, np.minimum(first + 1, before - 1), share


def stretched_bytes(pixels: Pixels, height: int, width: int) -> Pixels:
    """[H, W, C] uint8 -> [height, width, C], as torch resizes bytes (``antialias=False``): rows first, then
    columns, each rounded to bytes, by shares of 15 bits."""
    for axis, size in ((1, width), (0, height)):
        if pixels.shape[axis] != size:
            pixels = _stretched_along(pixels, size, axis)
    return pixels


def _stretched_along(pixels: Pixels, size: int, axis: int) -> Pixels:
    before = pixels.shape[axis]
    places = (before / size * (np.arange(size) + 0.5) - 0.5).clip(0)
    first = np.minimum(places.astype(np.int64), before - 1)
    share = (places - first).clip(0, 1)
    bits = _bits(float(max(share.max(), (1 - share).max())))
    shape = [1] * pixels.ndim
    shape[axis] = size
    total = np.full(1, 1 << (bits - 1), np.int64)
    for taken, part in ((first, 1 - share), (np.minimum(first + 1, before - 1), share)):
        weight = np.floor(part * (1 << bits) + 0.5).astype(np.int64).reshape(shape)
        total = total + np.take(pixels, taken, axis) * weight
    return (total >> bits).clip(0, 255).astype(np.uint8)


def _bits(most: float) -> int:
    """Bits behind the point with which no share, the largest being ``most``, has more than 15."""
    return next(bits for bits in range(22) if int(0.5 + most * (1 << (bits + 1))) >= 1 << 15)
