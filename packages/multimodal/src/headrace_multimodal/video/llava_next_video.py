"""Videos of LLaVA-NeXT-Video: each frame in one tile, a quarter of whose vectors are kept.

Zhang et al. 2024, "LLaVA-NeXT: A Strong Zero-shot Video Understanding Model".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images.anyres import AnyresProcessor
from headrace_multimodal.images.clip import OneSize
from headrace_multimodal.images.processor import packed
from headrace_multimodal.video.processor import PIXEL_VALUES_VIDEOS, Frames, VideoProcessor

_DEFAULT_SIZE = 224
"""Side of a frame where the settings say none."""


class LlavaNextVideos(VideoProcessor, AnyresProcessor):
    """``pixel_values_videos`` are [frames, 3, height, width]."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._frame = OneSize(self.video_stated, _DEFAULT_SIZE)
        if self.video_placeholder_id is not None and self._frame.size != (self.tile, self.tile):
            raise UnsupportedModel(
                f"video processor: makes frames of {self._frame.size}, and config.json says "
                f"vision_config.image_size = {self.tile}"
            )
        self._per_frame = (self.side // 2) ** 2

    def one_video(
        self, frames: Frames, metadata: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ProcessedMedia:
        values = np.stack([self._frame(frame) for frame in frames])
        count, placeholder = len(frames) * self._per_frame, self.video_placeholder_id
        assert placeholder is not None
        inputs = {PIXEL_VALUES_VIDEOS: packed(values)}
        return ProcessedMedia(inputs, count, (placeholder,) * count)

    def largest_video(self, num_frames: int, num_tokens: int) -> tuple[int, int, int]:
        return max(1, min(num_frames, num_tokens // self._per_frame)), self.tile, self.tile
