"""Spectrograms as Kaldi makes them, and frames that stand side by side.

Povey et al. 2011, "The Kaldi Speech Recognition Toolkit". Letters: n samples, F frames, M mel bins.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float32]
Double = npt.NDArray[np.float64]

_EMPHASIS = 0.97
_FLOOR = float(np.finfo(np.float32).eps)
_LOW = 20.0
"""Hz; bins begin there."""


def filter_banks(samples: Float, rate: int, num_bins: int, length: int, hop: int) -> Float:
    """[n] -> [F, M]: logarithms of power under Hamming windows; frames lie within the samples, have no mean,
    and their high pitches are raised.

    Args:
        length, hop: samples of a window, and from one to the next.
    """
    if len(samples) < length:
        return np.zeros((0, num_bins), np.float32)
    cut = np.lib.stride_tricks.sliding_window_view(samples, length)[::hop]
    frames = cut.astype(np.float64)  # quiet bins are small differences
    frames -= frames.mean(axis=1, keepdims=True)
    before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
    size = 1 << (length - 1).bit_length()
    spectrum = np.fft.rfft((frames - _EMPHASIS * before) * _hamming(length), n=size, axis=1)
    power = spectrum.real**2 + spectrum.imag**2
    mel = np.maximum(power @ kaldi_filters(num_bins, size, rate), _FLOOR)
    return np.asarray(np.log(mel), dtype=np.float32)


def side_by_side(frames: Float, number: int, step: int) -> Float:
    """[F, M] -> [ceil(F / step), number * M]: each ``step``-th frame amidst its neighbours; the first and the
    last are repeated where there are none."""
    left = (number - 1) // 2
    places = np.arange(0, len(frames), step)[:, None] + np.arange(number) - left
    return np.ascontiguousarray(
        frames[places.clip(0, len(frames) - 1)].reshape(len(places), -1), dtype=np.float32
    )


@functools.cache
def kaldi_filters(num_bins: int, fft_size: int, rate: int) -> Double:
    """Triangles [fft_size / 2 + 1, M] whose sides are straight on the mel scale; the highest frequency is in
    none."""
    hz = np.linspace(0.0, rate / 2, fft_size // 2 + 1)
    low, high = _mel(np.array([_LOW, rate / 2]))
    places, edges = _mel(hz), np.linspace(low, high, num_bins + 2)
    width = edges[1] - edges[0]
    rising = (places[:, None] - edges[None, :-2]) / width
    falling = (edges[None, 2:] - places[:, None]) / width
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    triangles[-1] = 0.0
    return np.asarray(triangles)


def _mel(hz: Double) -> Double:
    return np.asarray(1127.0 * np.log(1.0 + hz / 700.0))


@functools.cache
def _hamming(length: int) -> Double:
    places = np.arange(length)
    return np.asarray(0.54 - 0.46 * np.cos(2 * np.pi * places / (length - 1)))
