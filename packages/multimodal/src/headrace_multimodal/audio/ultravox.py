"""Ultravox's media processor: one spectrogram for a whole recording, a token for every 160 ms of a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.arrays import PackedArray
from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem, MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.audio.features import (
    INPUT_FEATURES,
    Float,
    audio_settings,
    integer,
    mel_settings,
)
from headrace_multimodal.audio.mel import log_mel
from headrace_multimodal.audio.waveform import samples_of
from headrace_multimodal.embeds_facts import check_facts, wrong_fact
from headrace_multimodal.hashing import content_hash
from headrace_multimodal.images.processor import part
from headrace_multimodal.images.words import Words
from headrace_multimodal.placeholders import expanded

_WRITTEN, _RESERVED = "<|audio|>", "<|reserved_special_token_0|>"
"""What prompts have for a recording; and the token that stands for it where that is none, as in Llama's
vocabulary."""
_CONTEXT, _BINS, _POSITIONS, _GROUP = 131_072, 128, 1500, 8
_LEAST_HOPS = 2


class UltravoxProcessor:
    """See :class:`headrace_core.multimodal.MediaProcessor`."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        encoder, text = part(config, "audio_config"), part(config, "text_config")
        self._mel = mel_settings(
            audio_settings(path), integer(encoder, "num_mel_bins", _BINS), path
        )
        self._window = 2 * integer(encoder, "max_source_positions", _POSITIONS)
        self._group = 2 * integer(config, "stack_factor", _GROUP)
        self._most = integer(text, "max_position_embeddings", _CONTEXT)
        self._words = Words(path)
        self._token = self._find_token()

    def _find_token(self) -> int:
        """Raises: UnsupportedModel: the vocabulary has no token that can stand for a recording."""
        try:
            return self._words.number(_WRITTEN)
        except UnsupportedModel:
            return self._words.number(_RESERVED)

    def modalities(self) -> Sequence[Modality]:
        return ("audio",)

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        """Raises: RequestError: a recording that no context holds; any option: there is none."""
        if options:
            raise RequestError(
                f"mm_processor_kwargs: {', '.join(map(repr, sorted(options)))}: Ultravox's processor has no "
                "options",
                param="mm_processor_kwargs",
            )
        return [self._processed(samples_of(item, self._mel.sample_rate)) for item in items]

    def _processed(self, samples: Float) -> ProcessedMedia:
        hop = self._mel.hop
        num_frames = max(_LEAST_HOPS, -(-len(samples) // hop))
        count = self._num_tokens(num_frames)
        if count > self._most:
            seconds = len(samples) / self._mel.sample_rate
            raise RequestError(
                f"audio of {seconds:.2f} s: takes {count} tokens, and the model's context has {self._most}",
                param="multi_modal_data",
            )
        frames = log_mel(np.pad(samples, (0, num_frames * hop - len(samples))), self._mel)
        packed = PackedArray("float32", frames.shape, np.ascontiguousarray(frames).tobytes())
        return ProcessedMedia({INPUT_FEATURES: packed}, count)

    def _num_tokens(self, num_frames: int) -> int:
        """Each window ends with a whole token."""
        whole, rest = divmod(num_frames, self._window)
        return whole * -(-self._window // self._group) + -(-rest // self._group)

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        """A window of silence: the encoder takes those of a recording one after another."""
        silence = np.zeros(self._window * self._mel.hop, dtype=np.float32)
        item = MediaItem("audio", silence, content_hash("audio", silence), {})
        return self.process([item], {})[0]

    embeds_width = 1

    def embedded(
        self, modality: Modality, num_vectors: int, facts: Mapping[str, Any]
    ) -> ProcessedMedia:
        """A recording of any length; see :class:`headrace_core.multimodal.TakesEmbeds`."""
        check_facts(facts, ())
        if num_vectors > self._most:
            raise wrong_fact("vectors", num_vectors, f"at most {self._most}")
        return ProcessedMedia({}, num_vectors)

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """See :class:`headrace_core.multimodal.MediaProcessor`."""
        return (self._token,)

    def placeholder(self, modality: Modality, index: int) -> str:
        """As the model's cards write it."""
        return _WRITTEN

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Raises: RequestError: other than one placeholder for each item."""
        marked = self._words.replaced(token_ids, _WRITTEN, self._token) if media else token_ids
        return expanded(marked, media, self._token)
