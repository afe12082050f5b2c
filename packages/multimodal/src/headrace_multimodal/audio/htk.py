"""Spectrograms on HTK's mel scale, whose filters all peak at 1.

Young et al. 2006, "The HTK Book", section 5.4. Letters: n samples, F frames, M mel bins.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float32]

_MELS_PER_LOG = 2595.0
_BEND = 700.0
"""Hz; the scale is about linear below."""


class Windows(NamedTuple):
    """How a spectrogram cuts its signal."""

    sample_rate: int = 16000
    fft_size: int = 512
    window: int = 400
    """Samples under a window, in the middle of those that are transformed."""
    hop: int = 160
    num_bins: int = 80


def mel_power(samples: Float, windows: Windows) -> Float:
    """[n] -> [1 + n // hop, M]: power under a periodic Hann window, each centred on its frame; the signal is
    mirrored at its ends, so that n must be above half a transform."""
    size, width = windows.fft_size, windows.window
    padded = np.pad(samples, size // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, size)[:: windows.hop]
    left = (size - width) // 2
    window = np.pad(_hann(width), (left, size - width - left))
    spectrum = np.fft.rfft(frames * window, axis=1)
    power = np.asarray(spectrum.real**2 + spectrum.imag**2, dtype=np.float32)
    return power @ htk_filters(windows.num_bins, size, windows.sample_rate)


@functools.cache
def htk_filters(
    num_bins: int, fft_size: int, sample_rate: int, low: float = 0.0, high: float | None = None
) -> Float:
    """Triangles [fft_size / 2 + 1, M] over the frequencies of a transform.

    Args:
        low, high: Hz between which they lie; None: up to half the rate.
    """
    nyquist = sample_rate / 2
    frequencies = np.linspace(0.0, nyquist, fft_size // 2 + 1)
    edges = _hz(np.linspace(_mel(low), _mel(nyquist if high is None else high), num_bins + 2))
    widths = np.diff(edges)
    distance = edges[None, :] - frequencies[:, None]
    rising = -distance[:, :-2] / widths[:-1]
    falling = distance[:, 2:] / widths[1:]
    return np.maximum(0.0, np.minimum(rising, falling)).astype(np.float32)


def _mel(hz: float) -> float:
    return float(_MELS_PER_LOG * np.log10(1.0 + hz / _BEND))


def _hz(mel: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(_BEND * (10.0 ** (mel / _MELS_PER_LOG) - 1.0))


@functools.cache
def _hann(size: int) -> Float:
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)).astype(np.float32)
