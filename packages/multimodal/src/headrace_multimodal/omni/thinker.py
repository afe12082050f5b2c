"""Base of the processors of Qwen's omni models: one for what is seen, one for what is heard."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_multimodal.audio.features import INPUT_FEATURES
from headrace_multimodal.audio.pieces import OPTIONS, PiecesProcessor
from headrace_multimodal.images.processor import PIXEL_VALUES, part, token_id
from headrace_multimodal.omni.by_modality import ByModality, Part
from headrace_multimodal.video.processor import PIXEL_VALUES_VIDEOS, VideoProcessor

_NOT_BUILT = (
    "a video's sound is not put between its frames; bring it as a recording of its own, or leave the "
    "option out"
)
_SOUND_OF_VIDEOS = dict.fromkeys(("use_audio_in_video", "load_audio_from_video"), _NOT_BUILT)


class ThinkerProcessor(ByModality):
    """A tower that the config leaves out takes nothing.

    Args:
        config: ``config.json``, whole.
        path: the checkpoint's folder.
    """

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        thinker = part(config, "thinker_config") or config
        parts = []
        if "vision_config" in thinker:
            parts.append(self._seeing(thinker, path))
        if "audio_config" in thinker:
            parts.append(self._hearing(thinker, path))
        super().__init__(parts, _SOUND_OF_VIDEOS)

    @abstractmethod
    def seeing(self, thinker: Mapping[str, Any], path: Path) -> VideoProcessor:
        """The processor of images and videos."""

    @abstractmethod
    def hearing(self, thinker: Mapping[str, Any], path: Path, token: int) -> PiecesProcessor:
        """The processor of recordings.

        Args:
            token: that stands for one.
        """

    def _seeing(self, thinker: Mapping[str, Any], path: Path) -> Part:
        videos = self.seeing(thinker, path)
        placeholders = {
            PIXEL_VALUES: videos.placeholder_id,
            PIXEL_VALUES_VIDEOS: token_id(thinker, "video_token_id", "video_token_index"),
        }
        return Part(videos, tuple(videos.options()), placeholders)

    def _hearing(self, thinker: Mapping[str, Any], path: Path) -> Part:
        token = token_id(thinker, "audio_token_id", "audio_token_index")
        return Part(self.hearing(thinker, path, token), OPTIONS, {INPUT_FEATURES: token})
