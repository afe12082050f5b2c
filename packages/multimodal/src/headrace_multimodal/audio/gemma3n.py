"""Gemma 3n's recordings: a spectrogram of up to 30 s, in as many places whatever its length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.arrays import PackedArray
from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem, MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.audio.features import INPUT_FEATURES, audio_settings, integer, truncation
from headrace_multimodal.audio.htk import Float, htk_filters
from headrace_multimodal.audio.waveform import samples_of
from headrace_multimodal.hashing import content_hash
from headrace_multimodal.images.processor import part
from headrace_multimodal.placeholders import expanded

_SECONDS, _MULTIPLE = 30, 128
"""Longest recording; samples are filled up to a multiple."""
_HALVINGS = 4
"""Frames of a state of the encoder, of which it keeps some."""
_TOKENS, _AUDIO, _BEGIN, _END = 188, 262_273, 256_000, 262_272
_RATE, _BINS, _EVERY = 16_000, 128, 4
_FRAME_MS, _HOP_MS, _LOW, _HIGH, _EMPHASIS, _FLOOR = 32.0, 10.0, 125.0, 7600.0, 0.97, 1e-5
"""Values that settings may leave out."""


class Gemma3nRecordings:
    """See :class:`headrace_core.multimodal.MediaProcessor`; no line ends are among a recording's tokens."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self._mel = _Spectrogram(audio_settings(path))
        encoder = part(config, "audio_config")
        if self._mel.bins != integer(encoder, "input_feat_size", _BINS):
            raise UnsupportedModel(
                f"{path}: the preprocessor makes {self._mel.bins} bins, the encoder takes "
                f"{integer(encoder, 'input_feat_size', _BINS)}"
            )
        self._number = integer(config, "audio_soft_tokens_per_image", _TOKENS)
        frames = _HALVINGS * integer(encoder, "conf_reduction_factor", _EVERY) * self._number
        self._most = min(_SECONDS * self._mel.rate, frames * self._mel.hop)
        self.placeholder_id = integer(config, "audio_token_id", _AUDIO)
        begin, end = integer(config, "boa_token_id", _BEGIN), integer(config, "eoa_token_id", _END)
        self._tokens = (begin, *[self.placeholder_id] * self._number, end)

    def modalities(self) -> Sequence[Modality]:
        return ("audio",)

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        """
        Args:
            options: ``truncation``, true to cut longer audio off.

        Raises:
            RequestError: an unknown option; a recording that is too long or too short.
        """
        cut = truncation(options)
        return [self._processed(samples_of(item, self._mel.rate), cut) for item in items]

    def _processed(self, samples: Float, cut: bool) -> ProcessedMedia:
        seconds, most = len(samples) / self._mel.rate, self._most / self._mel.rate
        # Resampling a clip of exactly the limit may yield a few samples more.
        if len(samples) >= self._most + self._mel.hop and not cut:
            raise _wrong(
                f"audio of {seconds:.2f} s: at most {most:g} s are taken at once; cut it, or "
                "set mm_processor_kwargs to {'truncation': true}"
            )
        frames = self._mel(samples[: self._most])
        if not len(frames):
            raise _wrong(f"audio of {seconds:.3f} s: too short for one frame")
        packed = PackedArray("float32", frames.shape, frames.tobytes())
        runs = ((1, self._number),)
        return ProcessedMedia({INPUT_FEATURES: packed}, len(self._tokens), self._tokens, runs)

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        """Silence as long as the model takes it."""
        silence = np.zeros(self._most, dtype=np.float32)
        item = MediaItem("audio", silence, content_hash("audio", silence), {})
        return self.process([item], {})[0]

    def placeholder(self, modality: Modality, index: int) -> str:
        """As the model's own chat template writes it."""
        return "<audio_soft_token>"

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`."""
        return expanded(token_ids, media, self.placeholder_id)


class _Spectrogram:
    """Logarithms of magnitudes, from a signal whose high pitches are raised.

    Args:
        stated: settings of the feature extractor.

    Raises:
        UnsupportedModel: it is another signal that is looked at.
    """

    def __init__(self, stated: Mapping[str, Any]) -> None:
        for key, accepted in (("preemphasis_htk_flavor", True), ("dither", 0.0)):
            if stated.get(key, accepted) != accepted:
                raise UnsupportedModel(
                    f"preprocessor: {key} = {stated[key]!r}: must be {accepted!r}"
                )
        self.rate = integer(stated, "sampling_rate", _RATE)
        self.bins = integer(stated, "feature_size", _BINS)
        self.length = round(self.rate * _number(stated, "frame_length_ms", _FRAME_MS) / 1000)
        self.hop = round(self.rate * _number(stated, "hop_length_ms", _HOP_MS) / 1000)
        self.size = (1 << (self.length - 1).bit_length()) * (
            1 + bool(stated.get("fft_overdrive", True))
        )
        low, high = _number(stated, "min_frequency", _LOW), _number(stated, "max_frequency", _HIGH)
        self.filters = htk_filters(self.bins, self.size, self.rate, low, high)
        self.emphasis = np.float32(_number(stated, "preemphasis", _EMPHASIS))
        self.loudness = np.float32(_number(stated, "input_scale_factor", 1.0))
        self.floor = np.float32(_number(stated, "mel_floor", _FLOOR))
        places = np.arange(self.length, dtype=np.float32)
        self.window = (0.5 * (1 - np.cos(2 * np.pi * places / self.length))).astype(np.float32)
        self.mean = self._of_bins(stated, "per_bin_mean", 0.0)
        self.spread = self._of_bins(stated, "per_bin_stddev", 1.0)

    def _of_bins(self, stated: Mapping[str, Any], key: str, default: float) -> Float:
        found = stated.get(key)
        values = np.asarray([default] * self.bins if found is None else found, dtype=np.float32)
        if values.shape != (self.bins,):
            raise UnsupportedModel(f"preprocessor: {key}: must be {self.bins} numbers")
        return values

    def __call__(self, samples: Float) -> Float:
        """[n] -> [frames, bins]; silence fills it up, and each frame sees a sample more than it takes."""
        more = -len(samples) % _MULTIPLE
        signal = np.pad(samples, (0, more)) * self.loudness
        if len(signal) <= self.length:
            return np.zeros((0, self.bins), np.float32)
        cut = np.lib.stride_tricks.sliding_window_view(signal, self.length + 1)[:: self.hop]
        first = cut[:, :1] * (1 - self.emphasis)
        frames = np.concatenate([first, cut[:, 1:-1] - self.emphasis * cut[:, :-2]], axis=1)
        magnitudes = np.abs(np.fft.rfft(frames * self.window, n=self.size, axis=1))
        mel = np.log(np.maximum(magnitudes @ self.filters, self.floor))
        return np.ascontiguousarray((mel - self.mean) / self.spread, dtype=np.float32)


def _number(stated: Mapping[str, Any], key: str, default: float) -> float:
    value = stated.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UnsupportedModel(f"preprocessor: {key} = {value!r}: must be a number from 0 on")
    return float(value)


def _wrong(what: str) -> RequestError:
    return RequestError(what, param="multi_modal_data")
