"""Gemma 4's media processor: images and videos, and recordings where the checkpoint hears.

Google 2026, Gemma 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace_core.arrays import PackedArray
from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import (
    MediaItem,
    MediaPlacement,
    MediaProcessor,
    Modality,
    ProcessedMedia,
)
from headrace_multimodal.audio.features import INPUT_FEATURES, audio_settings, integer, truncation
from headrace_multimodal.audio.gemma3n import Spectrogram
from headrace_multimodal.audio.htk import Float
from headrace_multimodal.audio.waveform import samples_of
from headrace_multimodal.embeds_facts import check_facts
from headrace_multimodal.hashing import content_hash
from headrace_multimodal.images.processor import PIXEL_VALUES, part
from headrace_multimodal.images.vocabulary import named_token
from headrace_multimodal.omni.by_modality import ByModality, Part
from headrace_multimodal.placeholders import expanded
from headrace_multimodal.video.gemma4 import MARK, MOST, Gemma4Processor
from headrace_multimodal.video.processor import PIXEL_VALUES_VIDEOS

_SECONDS = 30
_AUDIO, _BEGIN, _END = 258_881, 256_000, 258_883


def gemma4_processor(config: Mapping[str, Any], path: Path) -> MediaProcessor:
    """The processor of a checkpoint, by the towers that its config has.

    Args:
        config: ``config.json``, whole.
        path: its folder.
    """
    if config.get("audio_config") is None:
        return Gemma4Processor(config, path)
    return Gemma4Media(config, path)


class Gemma4Media(ByModality):
    """The arguments are those of :func:`gemma4_processor`."""

    embeds_width = 1

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self._heard = Gemma4Recordings(config, path)
        parts = [Part(self._heard, ("truncation",), {INPUT_FEATURES: self._heard.placeholder_id})]
        self._seen: Gemma4Processor | None = None
        if config.get("vision_config") is not None:
            self._seen = Gemma4Processor(config, path)
            tokens = {PIXEL_VALUES: self._seen.placeholder_id, PIXEL_VALUES_VIDEOS: MARK}
            parts.insert(0, Part(self._seen, (MOST,), tokens))
        super().__init__(parts, {})

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :class:`~headrace_multimodal.video.gemma4.Gemma4Processor`."""
        if self._seen is None:
            return super().place(token_ids, media)
        placed = super().place(self._seen.marked(token_ids, media), media)
        return self._seen.with_spans(placed, media)

    def embedded(
        self, modality: Modality, num_vectors: int, facts: Mapping[str, Any]
    ) -> ProcessedMedia:
        """See :class:`headrace_core.multimodal.TakesEmbeds`."""
        if modality == "audio" or self._seen is None:
            return self._heard.embedded(modality, num_vectors, facts)
        return self._seen.embedded(modality, num_vectors, facts)


class Gemma4Spectrogram(Spectrogram):
    """Frames whose middle is where they are; the first one begins with silence, the last one with nothing
    else than the recording."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **Spectrogram.defaults, "frame_length_ms": 20.0, "min_frequency": 0.0, "max_frequency": 8000.0,
        "preemphasis": 0.0, "mel_floor": 1e-3, "fft_overdrive": False,
    }  # fmt: skip
    window_type = np.float64

    def padded(self, samples: Float) -> Float:
        return np.pad(samples, (self.length // 2, 0))

    def floored(self, mel: Float) -> Float:
        return mel + self.floor


class Gemma4Recordings:
    """See :class:`headrace_core.multimodal.MediaProcessor`: recordings of up to 30 s, a token for every four
    frames. ``input_features`` are [frames, bins]."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self._mel = Gemma4Spectrogram(audio_settings(path))
        channels = part(config, "audio_config").get("subsampling_conv_channels", [128, 32])
        if not isinstance(channels, list) or channels[:1] != [self._mel.bins]:
            raise UnsupportedModel(
                f"{path}: the preprocessor makes {self._mel.bins} bins, the encoder takes as many as the "
                f"first of audio_config.subsampling_conv_channels = {channels!r}"
            )
        self._most = _SECONDS * self._mel.rate
        self.placeholder_id = integer(config, "audio_token_id", _AUDIO)
        self._begin = integer(config, "boa_token_id", _BEGIN)
        self._end = integer(config, "eoa_token_id", integer(config, "eoa_token_index", _END))
        self._text = named_token(path, "audio_token", "<|audio|>")

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
        made = self._of_vectors(-(-len(frames) // 4))
        return replace(made, inputs={INPUT_FEATURES: packed})

    def _of_vectors(self, number: int) -> ProcessedMedia:
        tokens = (self._begin, *[self.placeholder_id] * number, self._end)
        return ProcessedMedia({}, len(tokens), tokens, ((1, number),))

    def embedded(
        self, modality: Modality, num_vectors: int, facts: Mapping[str, Any]
    ) -> ProcessedMedia:
        """A recording of so many vectors."""
        check_facts(facts, ())
        return self._of_vectors(num_vectors)

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        """Silence as long as the model takes it."""
        silence = np.zeros(self._most, dtype=np.float32)
        item = MediaItem("audio", silence, content_hash("audio", silence), {})
        return self.process([item], {})[0]

    def placeholder(self, modality: Modality, index: int) -> str:
        return self._text

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`."""
        return expanded(token_ids, media, self.placeholder_id)
