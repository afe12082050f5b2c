"""Recordings of Phi-4-multimodal: spectrograms of windows that lie within the samples, without a mean taken
off, in bins up to 7,690 Hz; a token for every 80 ms.

Abouelenin et al. 2025, arXiv:2503.01743, section 2.2. Letters: n samples, F frames, M mel bins.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem, MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.audio.features import INPUT_FEATURES, audio_settings, integer
from headrace_multimodal.audio.kaldi import Double, Float
from headrace_multimodal.audio.waveform import samples_of
from headrace_multimodal.hashing import content_hash
from headrace_multimodal.images.processor import packed, part
from headrace_multimodal.placeholders import expanded

BESIDE_IMAGES = "beside_images"
"""Model input: [1] int64, 1 if the prompt has images as well; and the option that says so."""
_AUDIO_TOKEN = 200011
_RATE, _LENGTH, _HOP, _FFT = 16000, 400, 160, 512
_EMPHASIS, _HIGHEST, _LOUDEST = 0.97, 7690, 32768.0
_AT_ONCE = 4096
"""Frames that are transformed together."""
_LONGEST_SECONDS = 1800
"""As published: half an hour."""


class Phi4Recordings:
    """See :class:`headrace_core.multimodal.MediaProcessor`."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        stated = audio_settings(path)
        for key, only in (
            ("sampling_rate", _RATE), ("hop_length", _HOP), ("n_fft", _FFT), ("win_length", _LENGTH),
            ("preemphasis", _EMPHASIS), ("mel_min_frequency", 0), ("mel_max_frequency", _HIGHEST),
            ("audio_downsample_rate", 1), ("audio_feat_stride", 1),
        ):  # fmt: skip
            if stated.get(key, only) != only:
                raise UnsupportedModel(
                    f"audio processor: {key} = {stated[key]!r}: must be {only!r}"
                )
        encoder = part(config, "audio_config") or part(part(config, "audio_processor"), "config")
        self._factor = integer(encoder, "time_reduction", 8)
        self._bins = integer(encoder, "input_size", 80)
        for key, mine in (("audio_compression_rate", self._factor), ("feature_size", self._bins)):
            if stated.get(key, mine) != mine:
                raise UnsupportedModel(
                    f"audio processor: {key} = {stated[key]!r}: the encoder takes {mine}"
                )
        self.audio_token = integer(encoder, "audio_token_id", _AUDIO_TOKEN)

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """See :class:`headrace_core.multimodal.MediaProcessor`."""
        return (self.audio_token,)

    def modalities(self) -> Sequence[Modality]:
        return ("audio",)

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        """Raises: RequestError: a recording is too short or too long."""
        beside = np.array([int(options.get(BESIDE_IMAGES, False))], np.int64)
        return [self._processed(samples_of(item, _RATE), beside) for item in items]

    def _processed(self, samples: Float, beside: np.ndarray[Any, Any]) -> ProcessedMedia:
        seconds = len(samples) / _RATE
        if len(samples) < _LENGTH:
            raise _wrong(
                f"audio of {seconds:.3f} s: too short for one frame of {_LENGTH / _RATE} s"
            )
        if seconds > _LONGEST_SECONDS:
            raise _wrong(
                f"audio of {seconds:.2f} s: at most {_LONGEST_SECONDS} s are taken at once"
            )
        frames = spectrogram(samples, self._bins)
        inputs = {INPUT_FEATURES: packed(frames), BESIDE_IMAGES: packed(beside)}
        return ProcessedMedia(inputs, -(-len(frames) // self._factor))

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        """Silence as long as is taken, as is stated, or as ``num_tokens`` allow."""
        most = min(sizes.get("length", _RATE * _LONGEST_SECONDS), _RATE * _LONGEST_SECONDS)
        if "num_tokens" in sizes:
            frames = max(1, sizes["num_tokens"]) * self._factor
            most = min(most, (frames - 1) * _HOP + _LENGTH)
        silence = np.zeros(max(most, _LENGTH), dtype=np.float32)
        item = MediaItem("audio", silence, content_hash("audio", silence), {})
        return self.process([item], {})[0]

    def placeholder(self, modality: Modality, index: int) -> str:
        """As the model's cards write it."""
        return f"<|audio_{index + 1}|>"

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`."""
        return expanded(token_ids, media, self.audio_token)


def spectrogram(samples: Float, num_bins: int) -> Float:
    """[n] -> [F, M]: logarithms of power under Hamming windows, of samples as whole numbers of 16 bits."""
    cut = np.lib.stride_tricks.sliding_window_view(samples, _LENGTH)[::_HOP]
    found = [_logs(part, num_bins) for part in np.array_split(cut, -(-len(cut) // _AT_ONCE))]
    return np.concatenate(found)


def _logs(cut: Float, num_bins: int) -> Float:
    """In the precision of the published code, whose quiet bins are what is left of it."""
    before = np.concatenate([cut[:, :1], cut[:, :-1]], axis=1)
    raised = (cut - np.float32(_EMPHASIS) * before) * np.float32(_LOUDEST)
    spectrum = np.fft.rfft(raised * np.hamming(_LENGTH), n=_FFT, axis=1).astype(np.complex64)
    power = np.abs(spectrum) ** 2 @ _filters(num_bins).astype(np.float32)
    return np.asarray(np.log(np.maximum(power, np.float32(1))))


@functools.cache
def _filters(num_bins: int) -> Double:
    """Triangles [257, M] whose sides are straight on the mel scale."""
    places = _mel(np.linspace(0.0, _RATE / 2, _FFT // 2 + 1))
    edges = np.linspace(0.0, float(_mel(np.array([_HIGHEST]))[0]), num_bins + 2)
    width = edges[1] - edges[0]
    rising = (places[:, None] - edges[None, :-2]) / width
    falling = (edges[None, 2:] - places[:, None]) / width
    return np.asarray(np.maximum(0.0, np.minimum(rising, falling)))


def _mel(hz: Double) -> Double:
    return np.asarray(1127.0 * np.log(1.0 + hz / 700.0))


def _wrong(what: str) -> RequestError:
    return RequestError(what, param="multi_modal_data")
