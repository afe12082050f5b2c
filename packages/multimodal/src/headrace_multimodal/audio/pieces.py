"""Recordings for encoders that cut them into pieces: a spectrogram as long as the recording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace_core.arrays import PackedArray
from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaItem, MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.audio.features import (
    INPUT_FEATURES,
    Float,
    audio_settings,
    integer,
    mel_settings,
    truncation,
)
from headrace_multimodal.audio.mel import log_mel
from headrace_multimodal.audio.qwen2_audio import num_audio_tokens
from headrace_multimodal.audio.waveform import samples_of
from headrace_multimodal.placeholders import expanded

_SECONDS = 30
"""Longest recording where the preprocessor's settings say none."""
_BINS = 128
OPTIONS = ("truncation",)


class PiecesProcessor:
    """See :class:`headrace_core.multimodal.MediaProcessor`.

    Args:
        encoder: its part of ``config.json``.
        path: the checkpoint's folder.
        audio_token: the token that stands for a recording.
        text: placeholder where a template writes none.
    """

    frames_per_token: ClassVar[int] = 4
    """Frames of a token, in long recordings."""

    def __init__(self, encoder: Mapping[str, Any], path: Path, audio_token: int, text: str) -> None:
        stated = audio_settings(path)
        self.mel = mel_settings(stated, integer(encoder, "num_mel_bins", _BINS), path)
        self.num_samples = self.longest(stated)
        self.audio_token, self.text = audio_token, text

    def longest(self, stated: Mapping[str, Any]) -> int:
        """Samples of the longest recording.

        Args:
            stated: settings of the preprocessor.
        """
        return integer(stated, "chunk_length", _SECONDS) * self.mel.sample_rate

    def modalities(self) -> Sequence[Modality]:
        return ("audio",)

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        """
        Args:
            options: ``truncation``, true to cut longer audio off.

        Raises:
            RequestError: an unknown option; a recording that is too long, or too short to become a token.
        """
        cut = truncation(options)
        return [self._processed(samples_of(item, self.mel.sample_rate), cut) for item in items]

    def _processed(self, samples: Float, cut: bool) -> ProcessedMedia:
        seconds = len(samples) / self.mel.sample_rate
        # Resampling a clip of exactly the limit may yield a few samples more.
        if len(samples) >= self.num_samples + self.mel.hop and not cut:
            raise RequestError(
                f"audio of {seconds:.2f} s: at most {self.num_samples / self.mel.sample_rate:g} s are taken "
                "at once; cut it, or set mm_processor_kwargs to {'truncation': true}",
                param="multi_modal_data",
            )
        frames = self.frames(samples[: self.num_samples])
        count = self.num_tokens(len(frames))
        if count == 0:
            raise RequestError(
                f"audio of {seconds:.2f} s: too short to become a token",
                param="multi_modal_data",
            )
        packed = PackedArray("float32", frames.shape, frames.tobytes())
        return ProcessedMedia({INPUT_FEATURES: packed}, count)

    def num_tokens(self, num_frames: int) -> int:
        """Tokens of a recording."""
        return num_audio_tokens(num_frames)

    def frames(self, samples: Float) -> Float:
        """[frames, bins]. Behind the recording is silence, up to the longest that is taken; of that, only
        what its last frames look at is computed."""
        return self.frames_within(samples, self.num_samples)

    def frames_within(self, samples: Float, most: int) -> Float:
        """[frames, bins] of a recording, or a piece of one, of up to ``most`` samples."""
        hop = self.mel.hop
        whole = -(-(len(samples) + self.mel.fft_size) // hop) * hop
        padded = np.zeros(min(whole, most), dtype=np.float32)
        padded[: len(samples)] = samples
        return np.ascontiguousarray(log_mel(padded, self.mel)[: -(-len(samples) // hop)])

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        """Silence as long as the model takes it, as the stated ``length`` (samples at the model's rate) says,
        or as ``num_tokens`` allow."""
        tokens = sizes.get("num_tokens", self.num_samples)
        most = min(self.num_samples, sizes.get("length", self.num_samples))
        length = min(most, self.frames_per_token * self.mel.hop * tokens)
        return self._processed(np.zeros(length, np.float32), cut=False)

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """See :class:`headrace_core.multimodal.MediaProcessor`."""
        return (self.audio_token,)

    def placeholder(self, modality: Modality, index: int) -> str:
        return self.text

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`."""
        return expanded(token_ids, media, self.audio_token)
