"""The spectrogram that speech models hear: log-mel, as Whisper's authors define it.

Radford et al. 2022, arXiv:2212.04356, section 2.2; the mel scale is that of Slaney 1998, "Auditory
Toolbox", Interval Research TR 1998-010. Letters: n samples, F frames, M mel bins.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace_core.errors import UnsupportedModel

Float = npt.NDArray[np.float32]

_LINEAR_BELOW = 1000.0
"""Hz; the scale is linear up to here and logarithmic above."""
_HZ_PER_MEL = 200.0 / 3.0
_MELS_PER_LOG = 27.0 / np.log(6.4)
_FLOOR = 1e-10
_RANGE = 8.0
"""Powers of ten below the loudest point at which a spectrogram is cut off."""


@dataclass(frozen=True, slots=True)
class MelSettings:
    """Settings of a spectrogram.

    Raises:
        UnsupportedModel: a value is out of range.
    """

    num_bins: int = 80
    sample_rate: int = 16000
    fft_size: int = 400
    """Samples under one window: 25 ms."""
    hop: int = 160
    """Samples from one frame to the next: 10 ms."""

    def __post_init__(self) -> None:
        small = 1 <= self.num_bins <= 1024 and 1 <= self.hop <= self.fft_size <= 1 << 16
        if not small or not 1000 <= self.sample_rate <= 1_000_000:
            raise UnsupportedModel(
                f"{self}: bins must be 1 to 1024, hop 1 to fft_size, fft_size at most 65536, and "
                "sample_rate 1000 to 1000000"
            )


def log_mel(samples: Float, settings: MelSettings) -> Float:
    """The spectrogram of a whole clip, silence appended to it included.

    Args:
        samples: [n], one channel, -1..1, n at least 2; a multiple of the hop.

    Returns:
        [n / hop, M], about -1..1: the cut-off is relative to the clip's loudest point.
    """
    power = _power(samples.astype(np.float32, copy=False), settings)
    mel = np.log10(np.maximum(power @ mel_filters(settings).T, np.float32(_FLOOR)))
    mel = np.maximum(mel, mel.max() - np.float32(_RANGE))
    return np.asarray((mel + 4.0) / 4.0, dtype=np.float32)


def _power(samples: Float, settings: MelSettings) -> Float:
    """Squared magnitudes [n / hop, fft_size / 2 + 1] under a periodic Hann window.

    Windows are centred on their frame; the signal is mirrored at its ends.
    """
    size = settings.fft_size
    padded = np.pad(samples, size // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, size)[:: settings.hop]
    frames = frames[: len(samples) // settings.hop]
    spectrum = np.fft.rfft(frames * _hann(size), axis=1)
    return np.asarray(spectrum.real**2 + spectrum.imag**2, dtype=np.float32)


@functools.cache
def _hann(size: int) -> Float:
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)).astype(np.float32)


@functools.cache
def mel_filters(settings: MelSettings) -> Float:
    """Triangles [M, fft_size / 2 + 1] of equal area over the FFT's frequencies, up to half the rate."""
    nyquist = settings.sample_rate / 2
    frequencies = np.linspace(0.0, nyquist, settings.fft_size // 2 + 1)
    edges = _hz(np.linspace(0.0, _mel(nyquist), settings.num_bins + 2))
    widths = np.diff(edges)
    distance = edges[:, None] - frequencies[None, :]
    rising = -distance[:-2] / widths[:-1, None]
    falling = distance[2:] / widths[1:, None]
    areas = 2.0 / (edges[2:] - edges[:-2])
    triangles = np.maximum(0.0, np.minimum(rising, falling)) * areas[:, None]
    return triangles.astype(np.float32)


def _mel(hz: float) -> float:
    if hz < _LINEAR_BELOW:
        return hz / _HZ_PER_MEL
    return float(_LINEAR_BELOW / _HZ_PER_MEL + np.log(hz / _LINEAR_BELOW) * _MELS_PER_LOG)


def _hz(mel: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    bend = _LINEAR_BELOW / _HZ_PER_MEL
    curved = _LINEAR_BELOW * np.exp((mel - bend) / _MELS_PER_LOG)
    return np.where(mel < bend, mel * _HZ_PER_MEL, curved)
