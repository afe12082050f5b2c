"""Media processors of GLM-ASR, Audio Flamingo 3 and Music Flamingo: a spectrogram for each piece of 30 s,
and tokens for what is not silence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from headrace_core.arrays import PackedArray
from headrace_core.errors import RequestError
from headrace_core.multimodal import Modality, ProcessedMedia
from headrace_multimodal.audio.features import INPUT_FEATURES, NUM_FRAMES, integer
from headrace_multimodal.audio.mel import log_mel
from headrace_multimodal.audio.voxtral import VoxtralProcessor
from headrace_multimodal.embeds_facts import check_facts, wrong_fact
from headrace_multimodal.images.processor import part
from headrace_multimodal.images.settings import processor_settings

_POSITIONS = 1500


class PiecesOfSound(VoxtralProcessor):
    """See :class:`headrace_core.multimodal.MediaProcessor`. What no context holds is refused, and what the
    checkpoint's processor would cut off."""

    audio_token_default: ClassVar[int]
    max_seconds: ClassVar[int]
    """Values that configs may leave out."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__({"audio_token_id": self.audio_token_default, **config}, path)
        most = integer(processor_settings(path), "max_audio_len", self.max_seconds)
        seconds = self.extract.num_samples / self.extract.mel.sample_rate
        self.max_pieces = min(self.max_pieces, max(1, int(most / seconds)))

    def made(self, samples: npt.NDArray[np.float32]) -> ProcessedMedia:
        """Numbers and tokens of pieces of whole length.

        Raises: RequestError: a recording too short to become a token.
        """
        hop, length = self.extract.mel.hop, self.extract.num_samples
        padded = np.zeros(-(-len(samples) // length) * length, dtype=np.float32)
        padded[: len(samples)] = samples
        pieces = [log_mel(piece, self.extract.mel) for piece in padded.reshape(-1, length)]
        num_frames = -(-len(samples) // hop)
        per_vector = self.extract.num_frames // 2 // self.tokens_of_piece
        count = (num_frames + 1) // 2 // per_vector
        if not count:
            raise RequestError(
                f"audio of {len(samples) / self.extract.mel.sample_rate:.2f} s: too short to become a "
                "token",
                param="multi_modal_data",
            )
        frames = np.stack(pieces)
        inputs = {
            INPUT_FEATURES: PackedArray("float32", frames.shape, frames.tobytes()),
            NUM_FRAMES: PackedArray("int64", (1,), np.array([num_frames], np.int64).tobytes()),
        }
        return ProcessedMedia(inputs, count)

    def embedded(
        self, modality: Modality, num_vectors: int, facts: Mapping[str, Any]
    ) -> ProcessedMedia:
        """A recording of any length; see :class:`headrace_core.multimodal.TakesEmbeds`."""
        check_facts(facts, ())
        most = self.max_pieces * self.tokens_of_piece
        if num_vectors > most:
            raise wrong_fact("vectors", num_vectors, f"at most {most}")
        return ProcessedMedia({}, num_vectors)


class GlmAsrProcessor(PiecesOfSound):
    """A token for every 80 ms."""

    family = "GLM-ASR"
    audio_token_default = 59260
    max_seconds = 655

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        stated = part(config, "audio_config")
        positions = stated.get("max_position_embeddings", _POSITIONS)
        encoder = {"max_source_positions": positions, **stated}
        super().__init__({**config, "audio_config": encoder}, path)

    def placeholder(self, modality: Modality, index: int) -> str:
        """As the model's own chat template writes it."""
        return "<|begin_of_audio|><|pad|><|end_of_audio|>"


class AudioFlamingo3Processor(PiecesOfSound):
    """A token for every 40 ms."""

    family = "Audio Flamingo 3"
    audio_token_default = 151669
    max_seconds = 600

    def states_per_vector(self, encoder: Mapping[str, Any]) -> int:
        """Neighbours are averaged."""
        return 2

    def placeholder(self, modality: Modality, index: int) -> str:
        """As the model's own chat template writes it."""
        return "<sound>"


class MusicFlamingoProcessor(AudioFlamingo3Processor):
    """Two more tokens stand around the recording's."""

    family = "Music Flamingo"
    max_seconds = 1200

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self.begin = integer(config, "audio_bos_token_id", 151670)
        self.end = integer(config, "audio_eos_token_id", 151671)

    def made(self, samples: npt.NDArray[np.float32]) -> ProcessedMedia:
        """See :meth:`PiecesOfSound.made`."""
        return self._framed(super().made(samples))

    def embedded(
        self, modality: Modality, num_vectors: int, facts: Mapping[str, Any]
    ) -> ProcessedMedia:
        """See :class:`headrace_core.multimodal.TakesEmbeds`."""
        return self._framed(super().embedded(modality, num_vectors, facts))

    def _framed(self, made: ProcessedMedia) -> ProcessedMedia:
        count = made.num_tokens
        tokens = (self.begin, *[self.audio_token] * count, self.end)
        return ProcessedMedia(made.inputs, count + 2, tokens, ((1, count),))
