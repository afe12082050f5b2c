"""Qwen2.5-Omni's media processor: recordings of up to five minutes, images and videos as Qwen2.5-VL's.

Xu et al. 2025, arXiv:2503.20215.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_multimodal.audio.features import INPUT_FEATURES
from headrace_multimodal.audio.pieces import OPTIONS, PiecesProcessor
from headrace_multimodal.images.processor import PIXEL_VALUES, part, token_id
from headrace_multimodal.omni.by_modality import ByModality, Part
from headrace_multimodal.video.processor import PIXEL_VALUES_VIDEOS
from headrace_multimodal.video.qwen_vl import Qwen2_5VLVideos, number

_AUDIO = "<|audio_bos|><|AUDIO|><|audio_eos|>"
_NOT_BUILT = (
    "a video's sound is not put between its frames; bring it as a recording of its own, or leave the "
    "option out"
)
_REFUSED = dict.fromkeys(("use_audio_in_video", "load_audio_from_video"), _NOT_BUILT)


class OmniVideos(Qwen2_5VLVideos):
    """Its bounds of videos are fixed, whatever the settings of images say."""

    text = "<|vision_bos|><|IMAGE|><|vision_eos|>"
    video_text = "<|vision_bos|><|VIDEO|><|vision_eos|>"
    frame_rate = 2.0

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._least_video, self._most_video = self.bounds

    def places_per_second(self) -> float:
        return number(self.config, "position_id_per_seconds", 25)


class Qwen2_5OmniProcessor(ByModality):
    """See :class:`headrace_core.multimodal.MediaProcessor`. A tower that the config leaves out takes
    nothing."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        thinker = part(config, "thinker_config") or config
        parts = []
        if "vision_config" in thinker:
            parts.append(_seeing(thinker, path))
        if "audio_config" in thinker:
            parts.append(_hearing(thinker, path))
        super().__init__(parts, _REFUSED)


def _seeing(thinker: Mapping[str, Any], path: Path) -> Part:
    videos = OmniVideos(thinker, path)
    placeholders = {
        PIXEL_VALUES: videos.placeholder_id,
        PIXEL_VALUES_VIDEOS: token_id(thinker, "video_token_id", "video_token_index"),
    }
    return Part(videos, tuple(videos.options()), placeholders)


def _hearing(thinker: Mapping[str, Any], path: Path) -> Part:
    token = token_id(thinker, "audio_token_id", "audio_token_index")
    pieces = PiecesProcessor(part(thinker, "audio_config"), path, token, _AUDIO)
    return Part(pieces, OPTIONS, {INPUT_FEATURES: token})
