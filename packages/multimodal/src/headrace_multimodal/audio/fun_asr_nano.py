"""Fun-ASR-Nano's media processor: seven frames of a spectrogram side by side, a token for every sixth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.arrays import PackedArray
from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem, MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.audio.features import INPUT_FEATURES, Float, audio_settings, integer
from headrace_multimodal.audio.kaldi import filter_banks, side_by_side
from headrace_multimodal.audio.waveform import samples_of
from headrace_multimodal.hashing import content_hash
from headrace_multimodal.images.processor import part
from headrace_multimodal.placeholders import expanded

_AUDIO_TOKEN, _POSITIONS, _BINS, _STACKED = 151_646, 2049, 80, 7
_WINDOW = "hamming"


class FunAsrNanoProcessor:
    """See :class:`headrace_core.multimodal.MediaProcessor`."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        stated, encoder = audio_settings(path), part(config, "audio_config")
        self.rate, self.bins = (
            integer(stated, "sampling_rate", 16_000),
            integer(stated, "feature_size", _BINS),
        )
        self.length = self.rate * integer(stated, "frame_length", 25) // 1000
        self.hop = self.rate * integer(stated, "frame_shift", 10) // 1000
        self.stacked = integer(stated, "num_frames_lfr", _STACKED)
        self.step = integer(stated, "stride_lfr", 6)
        if stated.get("window", _WINDOW) != _WINDOW:
            raise UnsupportedModel(
                f"preprocessor: window = {stated['window']!r}: must be {_WINDOW!r}"
            )
        taken = (
            integer(encoder, "num_mel_bins", _BINS),
            integer(encoder, "num_stacked_frames", _STACKED),
        )
        if taken != (self.bins, self.stacked):
            raise UnsupportedModel(
                f"{path}: the preprocessor makes {self.stacked} frames of {self.bins} bins, the encoder "
                f"takes {taken[1]} of {taken[0]}"
            )
        self.most = integer(encoder, "max_position_embeddings", _POSITIONS) - 1
        self.audio_token = integer(config, "audio_token_id", _AUDIO_TOKEN)

    def modalities(self) -> Sequence[Modality]:
        return ("audio",)

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        """Raises: RequestError: a recording that is too short or too long; any option: there is none."""
        if options:
            raise RequestError(
                f"mm_processor_kwargs: {', '.join(map(repr, sorted(options)))}: Fun-ASR-Nano's processor has "
                "no options",
                param="mm_processor_kwargs",
            )
        return [self._processed(samples_of(item, self.rate)) for item in items]

    def _processed(self, samples: Float) -> ProcessedMedia:
        seconds = len(samples) / self.rate
        if len(samples) < self.length:
            raise _wrong(f"audio of {seconds:.3f} s: too short for one frame")
        count = -(-(1 + (len(samples) - self.length) // self.hop) // self.step)
        if count > self.most:
            most = self.most * self.step * self.hop / self.rate
            raise _wrong(f"audio of {seconds:.2f} s: at most {most:g} s are taken at once")
        frames = filter_banks(samples, self.rate, self.bins, self.length, self.hop)
        made = side_by_side(frames, self.stacked, self.step)
        packed = PackedArray("float32", made.shape, made.tobytes())
        return ProcessedMedia({INPUT_FEATURES: packed}, len(made))

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        """Silence as long as the model takes it, or as ``num_tokens`` allow."""
        tokens = min(self.most, max(1, sizes.get("num_tokens", self.most)))
        silence = np.zeros(self.length + (tokens * self.step - 1) * self.hop, dtype=np.float32)
        item = MediaItem("audio", silence, content_hash("audio", silence), {})
        return self.process([item], {})[0]

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """See :class:`headrace_core.multimodal.MediaProcessor`."""
        return (self.audio_token,)

    def placeholder(self, modality: Modality, index: int) -> str:
        """As the model's own chat template writes it."""
        return "<|object_ref_start|>"

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`."""
        return expanded(token_ids, media, self.audio_token)


def _wrong(what: str) -> RequestError:
    return RequestError(what, param="multi_modal_data")
