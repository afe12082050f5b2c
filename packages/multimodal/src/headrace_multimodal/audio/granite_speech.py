"""Granite Speech's media processor: a spectrogram whose frames stand two by two, three tokens for a window of
15 of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.arrays import PackedArray
from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem, MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.audio.features import INPUT_FEATURES, audio_settings, integer
from headrace_multimodal.audio.htk import Float, Windows, mel_power
from headrace_multimodal.audio.waveform import samples_of
from headrace_multimodal.hashing import content_hash
from headrace_multimodal.images.processor import part
from headrace_multimodal.placeholders import expanded

MAX_SECONDS = 600
"""A recording is encoded whole, so that it must not be of any length."""
_AUDIO_TOKEN = 49155
_FLOOR, _RANGE = 1e-10, 8.0
_ADAPTER = "adapter_config.json"


class GraniteSpeechProcessor:
    """See :class:`headrace_core.multimodal.MediaProcessor`."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        stated = audio_settings(path)
        merged = {**part(stated, "melspec_kwargs"), **stated}
        self.windows = Windows(
            integer(merged, "sampling_rate", 16000),
            integer(merged, "n_fft", 512),
            integer(merged, "win_length", 400),
            integer(merged, "hop_length", 160),
            integer(merged, "feature_size", integer(merged, "n_mels", 80)),
        )
        self.window = integer(config, "window_size", 15)
        self.queries = max(1, self.window // integer(config, "downsample_rate", 5))
        self._check(stated, part(config, "encoder_config"))
        self.audio_token = integer(
            config, "audio_token_index", integer(config, "audio_token_id", _AUDIO_TOKEN)
        )
        self.needs_media = ""
        if (path / _ADAPTER).is_file():
            self.needs_media = (
                "the checkpoint's adapter for recordings is in its weights; for text alone start with "
                "--limit-mm-per-prompt '{\"audio\": 0}'"
            )

    def _check(self, stated: Mapping[str, Any], encoder: Mapping[str, Any]) -> None:
        """Raises: UnsupportedModel: the preprocessor and the model disagree."""
        bins, taken = 2 * self.windows.num_bins, integer(encoder, "input_dim", 160)
        if bins != taken:
            raise UnsupportedModel(
                f"the preprocessor makes {bins} bins of two frames, the encoder takes {taken}"
            )
        window = integer(stated, "projector_window_size", 15)
        queries = max(1, window // integer(stated, "projector_downsample_rate", 5))
        if (window, queries) != (self.window, self.queries):
            raise UnsupportedModel(
                f"the preprocessor has windows of {window} for {queries} tokens, the model of "
                f"{self.window} for {self.queries}"
            )
        if self.windows.window > self.windows.fft_size:
            raise UnsupportedModel(
                f"win_length = {self.windows.window}: must be at most n_fft = {self.windows.fft_size}"
            )

    def modalities(self) -> Sequence[Modality]:
        return ("audio",)

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        """Raises: RequestError: a recording that is too short or that no context holds; any option."""
        if options:
            raise RequestError(
                f"mm_processor_kwargs: {', '.join(map(repr, sorted(options)))}: Granite Speech's processor "
                "has no options",
                param="mm_processor_kwargs",
            )
        return [self._processed(samples_of(item, self.windows.sample_rate)) for item in items]

    def _processed(self, samples: Float) -> ProcessedMedia:
        seconds = len(samples) / self.windows.sample_rate
        if len(samples) <= self.windows.fft_size // 2:
            raise _wrong(f"audio of {seconds:.3f} s: too short for one frame")
        if seconds > MAX_SECONDS:
            raise _wrong(f"audio of {seconds:.2f} s: at most {MAX_SECONDS} s are taken at once")
        count = self._num_tokens(len(samples))
        frames = self.frames(samples)
        return ProcessedMedia(
            {INPUT_FEATURES: PackedArray("float32", frames.shape, frames.tobytes())}, count
        )

    def _num_tokens(self, num_samples: int) -> int:
        states = (num_samples // self.windows.hop + 1) // 2
        return -(-states // self.window) * self.queries

    def frames(self, samples: Float) -> Float:
        """[states, 2 * bins]; an odd last frame is dropped."""
        mel = np.log10(np.maximum(mel_power(samples, self.windows), np.float32(_FLOOR)))
        mel = np.maximum(mel, mel.max() - np.float32(_RANGE)) / 4 + 1
        even = len(mel) // 2 * 2
        return np.ascontiguousarray(mel[:even].reshape(even // 2, -1), dtype=np.float32)

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        """Silence as long as the model takes it, or as ``num_tokens`` allow."""
        most = MAX_SECONDS * self.windows.sample_rate
        if "num_tokens" in sizes:
            states = max(1, sizes["num_tokens"] // self.queries) * self.window
            most = min(most, (2 * states - 1) * self.windows.hop)
        silence = np.zeros(max(most, self.windows.fft_size), dtype=np.float32)
        item = MediaItem("audio", silence, content_hash("audio", silence), {})
        return self.process([item], {})[0]

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """See :class:`headrace_core.multimodal.MediaProcessor`."""
        return (self.audio_token,)

    def placeholder(self, modality: Modality, index: int) -> str:
        """As the model's cards write it."""
        return "<|audio|>"

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`."""
        return expanded(token_ids, media, self.audio_token)


def _wrong(what: str) -> RequestError:
    return RequestError(what, param="multi_modal_data")
