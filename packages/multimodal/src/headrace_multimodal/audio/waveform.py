"""Decoded audio as a model wants it: one channel, at the model's rate."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace_core.errors import MissingDependency, RequestError
from headrace_core.multimodal import MediaItem

Float = npt.NDArray[np.float32]

INSTALL = "pip install 'headrace-multimodal[audio]'"
SAMPLE_RATE = "sample_rate"
"""Key of an audio item's ``metadata``: samples a second. Absent: the model's own rate."""


def samples_of(item: MediaItem, sample_rate: int) -> Float:
    """An item's samples [n] float32 at that rate; several channels are averaged.

    Raises:
        RequestError: the item is no audio, is empty, or holds what is no number.
        MissingDependency: its rate is another, and soxr is not installed.
    """
    if item.modality != "audio":
        raise _wrong(f"an item of modality {item.modality!r}: must be audio")
    samples = mono(item.data)
    rate = item.metadata.get(SAMPLE_RATE, sample_rate)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 1 <= rate <= 10_000_000:
        raise _wrong(f"sample rate = {rate!r}: must be a number from 1 to 10000000")
    return resampled(samples, rate, sample_rate)


def mono(data: Any) -> Float:
    """[n] or [channels, n] of real numbers -> [n] float32.

    Raises:
        RequestError: another shape or dtype, no samples, or one that is not finite.
    """
    try:
        samples = np.asarray(data)
    except (TypeError, ValueError, RuntimeError) as error:
        # Ragged lists, or a tensor that numpy cannot read.
        raise _wrong(
            f"samples of {type(data).__name__} that are not an array ({error}): must be [samples] or "
            "[channels, samples] of floats from -1 to 1"
        ) from error
    if samples.dtype.kind not in "f" or samples.ndim not in (1, 2) or samples.size == 0:
        raise _wrong(
            f"samples of shape {list(samples.shape)}, {samples.dtype}: must be [samples] or "
            "[channels, samples] of floats from -1 to 1, and not empty"
        )
    one = samples if samples.ndim == 1 else samples.mean(axis=0)
    one = np.ascontiguousarray(one, dtype=np.float32)
    if not np.isfinite(one).all():
        raise _wrong("samples that are not finite: must be numbers from -1 to 1")
    return one


def resampled(samples: Float, rate: float, wanted: int) -> Float:
    """[n] at ``rate`` -> at ``wanted`` samples a second, band-limited (soxr, high quality).

    Raises:
        MissingDependency: the rates differ and soxr is not installed.
    """
    if rate == wanted:
        return samples
    try:
        import soxr
    except ImportError as error:
        raise MissingDependency(
            "soxr", needed_for=f"audio of {rate:g} Hz for a model of {wanted} Hz", install=INSTALL
        ) from error
    return np.asarray(soxr.resample(samples, rate, wanted, quality="HQ"), dtype=np.float32)


def _wrong(what: str) -> RequestError:
    return RequestError(f"audio: {what}", param="multi_modal_data")
