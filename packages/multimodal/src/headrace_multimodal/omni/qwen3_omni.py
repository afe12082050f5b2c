"""Qwen3-Omni's media processor: recordings as long as the context, images and videos in Qwen3-VL's patches.

Xu et al. 2025, arXiv:2509.17765.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_multimodal.audio.pieces import PiecesProcessor
from headrace_multimodal.audio.qwen3 import ConvolvedPieces
from headrace_multimodal.images.steps import HALVES
from headrace_multimodal.omni.thinker import ThinkerProcessor
from headrace_multimodal.video.processor import VideoProcessor
from headrace_multimodal.video.qwen_vl import Qwen2_5VLVideos, number


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


class Qwen3OmniProcessor(ThinkerProcessor):
    """See :class:`headrace_core.multimodal.MediaProcessor`."""

    def seeing(self, thinker: Mapping[str, Any], path: Path) -> VideoProcessor:
        return OmniVideos(thinker, path)

    def hearing(self, thinker: Mapping[str, Any], path: Path, token: int) -> PiecesProcessor:
        return ConvolvedPieces(thinker, path, token)
