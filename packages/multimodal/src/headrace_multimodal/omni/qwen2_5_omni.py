"""Qwen2.5-Omni's media processor: recordings of up to five minutes, images and videos as Qwen2.5-VL's.

Xu et al. 2025, arXiv:2503.20215.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_multimodal.audio.pieces import PiecesProcessor
from headrace_multimodal.images.processor import part
from headrace_multimodal.omni.thinker import ThinkerProcessor
from headrace_multimodal.video.processor import VideoProcessor
from headrace_multimodal.video.qwen_vl import Qwen2_5VLVideos, number

_AUDIO = "<|audio_bos|><|AUDIO|><|audio_eos|>"


class OmniVideos(Qwen2_5VLVideos):
    """Its bounds of videos are fixed, whatever the settings of images say."""

    text = "<|vision_bos|><|IMAGE|><|vision_eos|>"
    prunes = False
    video_text = "<|vision_bos|><|VIDEO|><|vision_eos|>"
    frame_rate = 2.0

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._least_video, self._most_video = self.bounds

    def places_per_second(self) -> float:
        return number(self.config, "position_id_per_seconds", 25)


class Qwen2_5OmniProcessor(ThinkerProcessor):
    """See :class:`headrace_core.multimodal.MediaProcessor`."""

    def seeing(self, thinker: Mapping[str, Any], path: Path) -> VideoProcessor:
        return OmniVideos(thinker, path)

    def hearing(self, thinker: Mapping[str, Any], path: Path, token: int) -> PiecesProcessor:
        return PiecesProcessor(part(thinker, "audio_config"), path, token, _AUDIO)
