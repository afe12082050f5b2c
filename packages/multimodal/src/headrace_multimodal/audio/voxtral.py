"""Voxtral's media processor: one spectrogram for a whole recording, as long as pieces of 30 s make it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from headrace_core.arrays import PackedArray
from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem, MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.audio.features import INPUT_FEATURES, FeatureExtractor
from headrace_multimodal.audio.mel import log_mel
from headrace_multimodal.audio.waveform import samples_of
from headrace_multimodal.embeds_facts import check_facts, wrong_fact
from headrace_multimodal.placeholders import expanded

_ENCODER = {
    "num_mel_bins": 128, "max_source_positions": 1500, "hidden_size": 1280, "intermediate_size": 5120,
}  # fmt: skip
_AUDIO_TOKEN = 24
_CONTEXT = 131072


class VoxtralProcessor:
    """See :class:`headrace_core.multimodal.MediaProcessor`."""

    family: ClassVar[str] = "Voxtral"
    """Name in messages."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        encoder = {**_ENCODER, **_part(config, "audio_config")}
        self.extract = FeatureExtractor.of(encoder, path)
        states = self.extract.num_frames // 2
        self.tokens_of_piece = max(1, states // self.states_per_vector(encoder))
        text = {"max_position_embeddings": _CONTEXT, **_part(config, "text_config")}
        self.max_pieces = max(1, _size(text, "max_position_embeddings") // self.tokens_of_piece)
        self.audio_token = _size({"audio_token_id": _AUDIO_TOKEN, **config}, "audio_token_id")

    def states_per_vector(self, encoder: Mapping[str, Any]) -> int:
        """States of the encoder that become a vector.

        Args:
            encoder: its part of the config.
        """
        hidden, grouped = _size(encoder, "hidden_size"), _size(encoder, "intermediate_size")
        return max(1, grouped // hidden)

    def modalities(self) -> Sequence[Modality]:
        return ("audio",)

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        """Raises: RequestError: a recording that no context holds; any option: there is none."""
        if options:
            raise RequestError(
                f"mm_processor_kwargs: {', '.join(map(repr, sorted(options)))}: {self.family}'s "
                "processor has no options",
                param="mm_processor_kwargs",
            )
        return [self._processed(item) for item in items]

    def _processed(self, item: MediaItem) -> ProcessedMedia:
        samples = samples_of(item, self.extract.mel.sample_rate)
        pieces = -(-len(samples) // self.extract.num_samples)
        if pieces > self.max_pieces:
            seconds = self.extract.num_samples / self.extract.mel.sample_rate
            raise RequestError(
                f"audio of {len(samples) / self.extract.mel.sample_rate:.2f} s: at most "
                f"{self.max_pieces * seconds:g} s fit into the model's context",
                param="multi_modal_data",
            )
        return self.made(samples)

    def made(self, samples: npt.NDArray[np.float32]) -> ProcessedMedia:
        """Numbers and tokens of a recording."""
        pieces = -(-len(samples) // self.extract.num_samples)
        padded = np.zeros(pieces * self.extract.num_samples, dtype=np.float32)
        padded[: len(samples)] = samples
        frames = np.ascontiguousarray(log_mel(padded, self.extract.mel))
        packed = PackedArray("float32", frames.shape, frames.tobytes())
        return ProcessedMedia({INPUT_FEATURES: packed}, pieces * self.tokens_of_piece)

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        """One piece: the encoder takes those of a recording one after another."""
        return self.process([self.extract.longest()], {})[0]

    embeds_width = 1

    def embedded(
        self, modality: Modality, num_vectors: int, facts: Mapping[str, Any]
    ) -> ProcessedMedia:
        """A recording of whole pieces; see :class:`headrace_core.multimodal.TakesEmbeds`."""
        check_facts(facts, ())
        most = self.max_pieces * self.tokens_of_piece
        if num_vectors % self.tokens_of_piece or num_vectors > most:
            raise wrong_fact(
                "vectors", num_vectors, f"a multiple of {self.tokens_of_piece}, at most {most}"
            )
        return ProcessedMedia({}, num_vectors)

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """See :class:`headrace_core.multimodal.MediaProcessor`."""
        return (self.audio_token,)

    def placeholder(self, modality: Modality, index: int) -> str:
        """As the model's tokenizer spells it."""
        return "[BEGIN_AUDIO][AUDIO]"

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`."""
        return expanded(token_ids, media, self.audio_token)


def _part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = config.get(key, {})
    if not isinstance(part, Mapping):
        raise UnsupportedModel(f"config.json: {key} = {part!r:.200}: must be an object")
    return part


def _size(settings: Mapping[str, Any], key: str) -> int:
    value = settings[key]
    if type(value) is not int or value < 1:
        raise UnsupportedModel(f"config.json: {key} = {value!r:.200}: must be a positive integer")
    return value
