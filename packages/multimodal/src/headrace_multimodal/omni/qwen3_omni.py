"""Qwen3-Omni's media processor: recordings as long as the context, images and videos in Qwen3-VL's patches.

Xu et al. 2025, arXiv:2509.17765.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace_multimodal.audio.features import Float, integer
from headrace_multimodal.audio.mel import log_mel
from headrace_multimodal.audio.pieces import PiecesProcessor
from headrace_multimodal.images.processor import part
from headrace_multimodal.images.steps import HALVES
from headrace_multimodal.omni.thinker import ThinkerProcessor
from headrace_multimodal.video.processor import VideoProcessor
from headrace_multimodal.video.qwen_vl import Qwen2_5VLVideos, number

_AUDIO = "<|audio_start|><|audio_pad|><|audio_end|>"
_CONTEXT = 32_768
_WINDOW = 50
"""Values that configs may leave out."""
_CONVOLUTIONS = 3


class OmniVideos(Qwen2_5VLVideos):
    """Its bounds of videos are fixed, whatever the settings of images say."""

    bounds = (128 * 32 * 32, 768 * 32 * 32)
    colours = (HALVES, HALVES)
    frame_rate = 1.0
    prunes = False

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._least_video, self._most_video = self.bounds

    def places_per_second(self) -> float:
        return number(self.config, "position_id_per_seconds", 25)


class OmniAudio(PiecesProcessor):
    """A recording is taken as it is, without silence behind it.

    Args:
        thinker: its part of ``config.json``.
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
        """Each piece goes through convolutions that halve it."""
        whole, rest = divmod(num_frames, self._piece)
        return whole * _halved(self._piece) + _halved(rest)

    def frames(self, samples: Float) -> Float:
        """[frames, bins]; a last hop that is not whole is left out, as is a recording that is shorter than
        half a window, which is mirrored at the ends."""
        if len(samples) <= self.mel.fft_size // 2:
            return np.zeros((0, self.mel.num_bins), np.float32)
        return np.ascontiguousarray(log_mel(samples, self.mel))


class Qwen3OmniProcessor(ThinkerProcessor):
    """See :class:`headrace_core.multimodal.MediaProcessor`."""

    def seeing(self, thinker: Mapping[str, Any], path: Path) -> VideoProcessor:
        return OmniVideos(thinker, path)

    def hearing(self, thinker: Mapping[str, Any], path: Path, token: int) -> PiecesProcessor:
        return OmniAudio(thinker, path, token)


def _halved(size: int) -> int:
    for _ in range(_CONVOLUTIONS):
        size = (size + 1) // 2
    return size
