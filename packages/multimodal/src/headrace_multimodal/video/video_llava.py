"""Video-LLaVA's images and videos: all of one size; a frame has one token more than an image.

Lin et al. 2023, arXiv:2311.10122.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images.clip import LlavaProcessor, OneSize
from headrace_multimodal.images.processor import packed, part
from headrace_multimodal.video.processor import PIXEL_VALUES_VIDEOS, Frames, VideoProcessor

_DEFAULT_SIZE = 224
"""Side of an image where config and settings say none."""


class VideoLlavaProcessor(VideoProcessor, LlavaProcessor):
    """``pixel_values`` are [3, height, width], ``pixel_values_videos`` [frames, 3, height, width]."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        vision = {"image_size": _DEFAULT_SIZE, **part(config, "vision_config")}
        super().__init__({**config, "vision_config": vision}, path)
        side = vision["image_size"]
        self._frame = OneSize(self.video_stated, _DEFAULT_SIZE)
        for kind, size in (("image", self._shape.size), ("video", self._frame.size)):
            if size != (side, side):
                raise UnsupportedModel(
                    f"{kind} processor: makes images of {size}, and config.json says "
                    f"vision_config.image_size = {side!r}"
                )
        self._per_frame = (side // self._patch) ** 2 + 1

    def one_video(
        self, frames: Frames, metadata: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ProcessedMedia:
        values = np.stack([self._frame(frame) for frame in frames])
        count, placeholder = len(frames) * self._per_frame, self.video_placeholder_id
        assert placeholder is not None
        inputs = {PIXEL_VALUES_VIDEOS: packed(values)}
        return ProcessedMedia(inputs, count, (placeholder,) * count)

    def largest_video(self, num_frames: int, num_tokens: int) -> tuple[int, int, int]:
        return max(1, min(num_frames, num_tokens // self._per_frame)), *self._frame.size
