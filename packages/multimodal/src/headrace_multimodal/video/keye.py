"""Videos of Keye-VL, whose frames stand apart by seconds, and of Keye-VL 1.5: frames are as images, each
behind its time.

Kwai Keye Team 2025, arXiv:2507.01949, arXiv:2509.01563. In 1.5 all frames are the paper's slow ones, as in
the published processor where nobody tells it which are alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images.processor import packed, part
from headrace_multimodal.images.qwen_vl import near_square
from headrace_multimodal.images.steps import resized
from headrace_multimodal.images.vocabulary import special_token_id
from headrace_multimodal.images.words import Words
from headrace_multimodal.native_size.keye import KeyeProcessor
from headrace_multimodal.video.processor import PIXEL_VALUES_VIDEOS, Frames, VideoProcessor
from headrace_multimodal.video.qwen_vl import GRID, Qwen2_5VLVideos, number

_FRAME = "<|frame|>"


class KeyeVideos(Qwen2_5VLVideos, KeyeProcessor):
    """Each frame is as large as an image; the settings of images are those of videos."""

    frame_rate: ClassVar[float] = 2.0
    prunes: ClassVar[bool] = False

    def places_per_second(self) -> float:
        return number(part(self.config, "vision_config"), "tokens_per_second", 2)

    def frame_size(
        self, count: int, height: int, width: int, least: int, most: int
    ) -> tuple[int, int]:
        return self.image_size((height, width), (least, most))


class KeyeVL1_5Videos(VideoProcessor, KeyeProcessor):
    """A checkpoint whose tokenizer has no token for a frame takes images only."""

    video_text = "<|vision_start|><|video_pad|><|vision_end|>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._words = Words(path)

    def find_video_placeholder(self) -> int | None:
        try:
            self._frame = special_token_id(self.path, _FRAME)
        except UnsupportedModel:
            return None
        return super().find_video_placeholder()

    def one_video(
        self, frames: Frames, metadata: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ProcessedMedia:
        """Raises: RequestError: a side is 200 times as long as the other, or an option is no size."""
        height, width = self.image_size(frames.shape[1:3], self.image_limits(options))
        grid = len(frames), height // self._patch, width // self._patch
        fitted = [resized(frame, height, width, self._resample) for frame in frames]
        patches = [self._patches(self._numbers(frame), *grid[1:]) for frame in fitted]
        inputs = {
            PIXEL_VALUES_VIDEOS: packed(np.concatenate(patches)),
            GRID: packed(np.array(grid, np.int64)),
        }
        return self._with_times(inputs, grid, metadata)

    def _with_times(
        self, inputs: Mapping[str, Any], grid: tuple[int, int, int], metadata: Mapping[str, Any]
    ) -> ProcessedMedia:
        """The item with its tokens; a time stands where the rate is known."""
        per, placeholder = math.prod(grid[1:]) // self._merge**2, self.video_placeholder_id
        assert placeholder is not None
        rate, tokens, runs = metadata.get("fps"), [], []
        for index in metadata.get("frames_indices") or range(grid[0]):
            tokens += [self._frame, *(self._words.ids(f"{index / rate:.1f}") if rate else ())]
            runs.append((len(tokens), per))
            tokens += [placeholder] * per
        return ProcessedMedia(inputs, len(tokens), tuple(tokens), tuple(runs))

    def largest_video(self, num_frames: int, num_tokens: int) -> tuple[int, int, int]:
        count, factor = min(num_frames, num_tokens), self._patch * self._merge
        most = min(self._most // factor**2, num_tokens // count)
        return count, *near_square(most, factor)
