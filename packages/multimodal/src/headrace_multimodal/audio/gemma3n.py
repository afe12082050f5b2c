"""Gemma 3n's recordings: a spectrogram of up to 30 s, in as many places whatever its length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

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
"""Values that settings may leave out."""


class Gemma3nRecordings:
    """See :class:`headrace_core.multimodal.MediaProcessor`; no line ends are among a recording's tokens."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self._mel = Spectrogram(audio_settings(path))
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
        frames = self._mel.of_clip(samples, self._most, cut=cut)
        packed = PackedArray("float32", frames.shape, frames.tobytes())
        runs = ((1, self._number),)
        return ProcessedMedia({INPUT_FEATURES: packed}, len(self._tokens), self._tokens, runs)

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        """Silence as long as the model takes it."""
        silence = np.zeros(self._most, dtype=np.float32)
        item = MediaItem("audio", silence, content_hash("audio", silence), {})
        return self.process([item], {})[0]

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """See :class:`headrace_core.multimodal.MediaProcessor`."""
        return (self.placeholder_id,)

    def placeholder(self, modality: Modality, index: int) -> str:
        """As the model's own chat template writes it."""
        return "<audio_soft_token>"

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`."""
        return expanded(token_ids, media, self.placeholder_id)


class Spectrogram:
    """Logarithms of magnitudes, from a signal whose high pitches are raised.

    Args:
        stated: settings of the feature extractor.

    Raises:
        UnsupportedModel: it is another signal that is looked at.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "frame_length_ms": 32.0, "hop_length_ms": 10.0, "min_frequency": 125.0, "max_frequency": 7600.0,
        "preemphasis": 0.97, "mel_floor": 1e-5, "input_scale_factor": 1.0, "fft_overdrive": True,
    }  # fmt: skip
    """Values that settings may leave out."""
    window_type: ClassVar[type[np.floating[Any]]] = np.float32
    """Of the numbers that the window is computed in."""

    def __init__(self, stated: Mapping[str, Any]) -> None:
        for key, accepted in (("preemphasis_htk_flavor", True), ("dither", 0.0)):
            if stated.get(key, accepted) != accepted:
                raise UnsupportedModel(
                    f"preprocessor: {key} = {stated[key]!r}: must be {accepted!r}"
                )
        stated = {**self.defaults, **stated}
        self.rate = integer(stated, "sampling_rate", _RATE)
        self.bins = integer(stated, "feature_size", _BINS)
        self.length = round(self.rate * _number(stated, "frame_length_ms") / 1000)
        self.hop = round(self.rate * _number(stated, "hop_length_ms") / 1000)
        self.size = (1 << (self.length - 1).bit_length()) * (1 + bool(stated["fft_overdrive"]))
        low, high = _number(stated, "min_frequency"), _number(stated, "max_frequency")
        self.filters = htk_filters(self.bins, self.size, self.rate, low, high)
        self.emphasis = np.float32(_number(stated, "preemphasis"))
        self.loudness = np.float32(_number(stated, "input_scale_factor"))
        self.floor = np.float32(_number(stated, "mel_floor"))
        places = np.arange(self.length, dtype=self.window_type)
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
        """[n] -> [frames, bins]; each frame sees a sample more than it takes."""
        signal = self.padded(samples) * self.loudness
        if len(signal) <= self.length:
            return np.zeros((0, self.bins), np.float32)
        cut = np.lib.stride_tricks.sliding_window_view(signal, self.length + 1)[:: self.hop]
        first = cut[:, :1] * (1 - self.emphasis)
        frames = np.concatenate([first, cut[:, 1:-1] - self.emphasis * cut[:, :-2]], axis=1)
        magnitudes = np.abs(np.fft.rfft(frames * self.window, n=self.size, axis=1))
        mel = np.log(self.floored(magnitudes @ self.filters))
        return np.ascontiguousarray((mel - self.mean) / self.spread, dtype=np.float32)

    def of_clip(self, samples: Float, most: int, *, cut: bool) -> Float:
        """The same of a recording of at most so many samples.

        Args:
            cut: what is longer is cut off.

        Raises:
            RequestError: it is longer, or too short.
        """
        seconds = len(samples) / self.rate
        # Resampling a clip of exactly the limit may yield a few samples more.
        if len(samples) >= most + self.hop and not cut:
            raise _wrong(
                f"audio of {seconds:.2f} s: at most {most / self.rate:g} s are taken at once; cut it, or "
                "set mm_processor_kwargs to {'truncation': true}"
            )
        frames = self(samples[:most])
        if not len(frames):
            raise _wrong(f"audio of {seconds:.3f} s: too short for one frame")
        return frames

    def padded(self, samples: Float) -> Float:
        """A signal with the silence that belongs to it, which fills it up."""
        return np.pad(samples, (0, -len(samples) % _MULTIPLE))

    def floored(self, mel: Float) -> Float:
        """Numbers that have logarithms."""
        return np.maximum(mel, self.floor)


def _number(stated: Mapping[str, Any], key: str) -> float:
    value = stated[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UnsupportedModel(f"preprocessor: {key} = {value!r}: must be a number from 0 on")
    return float(value)


def _wrong(what: str) -> RequestError:
    return RequestError(what, param="multi_modal_data")
