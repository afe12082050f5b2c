"""Recordings of Qwen3-Omni and Qwen3-ASR: as they are, without silence behind, as long as the context."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace_multimodal.audio.features import Float, audio_settings, integer
from headrace_multimodal.audio.mel import log_mel
from headrace_multimodal.audio.pieces import PiecesProcessor
from headrace_multimodal.images.processor import part

_AUDIO = "<|audio_start|><|audio_pad|><|audio_end|>"
_AUDIO_TOKEN = 151676
_CONTEXT = 32_768
_WINDOW = 50
"""Values that configs may leave out."""
_CONVOLUTIONS = 3


class ConvolvedPieces(PiecesProcessor):
    """Pieces go through convolutions that halve them.

    Args:
        thinker: the part of ``config.json`` that has those of the towers.
        path: the checkpoint's folder.
        audio_token: the token that stands for a recording.
    """

    frames_per_token: ClassVar[int] = 8

    def __init__(self, thinker: Mapping[str, Any], path: Path, audio_token: int) -> None:
        encoder, text = part(thinker, "audio_config"), part(thinker, "text_config")
        self._piece = 2 * integer(encoder, "n_window", _WINDOW)
        self._context = integer(text, "max_position_embeddings", _CONTEXT)
        super().__init__(encoder, path, audio_token, _AUDIO)

    def longest(self, stated: Mapping[str, Any]) -> int:
        """As many whole pieces as the context holds."""
        pieces = max(1, self._context // self.num_tokens(self._piece))
        return pieces * self._piece * self.mel.hop

    def num_tokens(self, num_frames: int) -> int:
        whole, rest = divmod(num_frames, self._piece)
        return whole * _halved(self._piece) + _halved(rest)

    def frames(self, samples: Float) -> Float:
        """[frames, bins]; a last hop that is not whole is left out, as is a recording that is shorter than
        half a window, which is mirrored at the ends."""
        if len(samples) <= self.mel.fft_size // 2:
            return np.zeros((0, self.mel.num_bins), np.float32)
        return np.ascontiguousarray(log_mel(samples, self.mel))


class Qwen3ASRProcessor(ConvolvedPieces):
    """See :class:`headrace_core.multimodal.MediaProcessor`. Silence fills up recordings of less than half a
    second.

    Args:
        config: ``config.json``, whole.
        path: the checkpoint's folder.
    """

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        thinker = part(config, "thinker_config") or config
        self._least = integer(audio_settings(path), "min_length", 8000)
        super().__init__(thinker, path, integer(thinker, "audio_token_id", _AUDIO_TOKEN))

    def frames(self, samples: Float) -> Float:
        """See :meth:`ConvolvedPieces.frames`."""
        return super().frames(np.pad(samples, (0, max(0, self._least - len(samples)))))


def _halved(size: int) -> int:
    for _ in range(_CONVOLUTIONS):
        size = (size + 1) // 2
    return size
