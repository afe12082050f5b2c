"""Videos of Kimi K2.5: frames in stretches of four, which become as many vectors as one frame, each stretch
behind the time of its first frame.

Kimi Team 2026, arXiv:2602.02276.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images.processor import packed, part
from headrace_multimodal.images.qwen_vl import near_square
from headrace_multimodal.images.steps import HALVES, Numbers
from headrace_multimodal.native_size.kimi import (
    KimiK25Processor,
    Size,
    own_settings,
    side_of,
    square_of,
    whole_number,
)
from headrace_multimodal.video.introduced import IntroducedVideos
from headrace_multimodal.video.processor import PIXEL_VALUES_VIDEOS, Frames

GRID = "video_grid_thw"
"""Model input: [stretches, 3] int64, frames, and rows and columns of patches."""
FRAME_RATE = 24.0
"""Frames a second of a video that says none."""
_BEGIN, _END = "<|media_begin|>video<|media_content|>", "<|media_end|>"
_FRAMES, _MOST = 4, 4096
"""Frames of a stretch and patches of a frame, where no settings say them."""
_TIMES = "hh:mm:ss.fff"
_ONLY: Mapping[str, object] = {"in_patch_limit_video": None, "timestamp_mode": _TIMES}
"""Settings with the one value that is served."""

_WAVES = ("pos_emb_time", "init_pos_emb_time")
"""Keys of the most frames that a tower tells apart."""


class KimiK25Videos(IntroducedVideos, KimiK25Processor):
    """``pixel_values_videos`` are [patches, 3 * patch * patch], frame by frame and row by row."""

    video_text = "<|kimi_k25_video_placeholder|>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        stated, vision = own_settings(self.video_stated), part(config, "vision_config")
        self._video_numbers = Numbers.of(stated, HALVES, HALVES)
        frames = ("temporal_merge_kernel_size", "temporal_patch_size")
        self._frames = whole_number(stated, frames, _FRAMES)
        most = ("in_patch_limit_each_frame", "max_patches")
        self._most_of_frame = whole_number(stated, most, _MOST)
        self._side_of_frame = side_of(stated)
        if self.video_placeholder_id is not None:
            self._check(stated, vision)

    def _check(self, stated: Mapping[str, Any], vision: Mapping[str, Any]) -> None:
        """Raises: UnsupportedModel: frames have other patches than images, or settings are not served."""
        own = {"patch_size": self._patch, "merge_size": self._merge}
        found = {
            "patch_size": whole_number(stated, ("patch_size",), self._patch),
            "merge_size": square_of(stated, vision),
        }
        for key, wanted in {**own, **_ONLY}.items():
            value = found.get(key, stated.get(key, wanted))
            if value != wanted:
                raise UnsupportedModel(f"video processor: {key} = {value!r}: must be {wanted!r}")
        waves = next((vision[key] for key in _WAVES if key in vision), _FRAMES)
        if type(waves) is not int or self._frames > waves:
            raise UnsupportedModel(
                f"video processor: stretches of {self._frames} frames: the tower takes {waves!r} "
                "(vision_config.pos_emb_time)"
            )

    def one_video(
        self, frames: Frames, metadata: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ProcessedMedia:
        """See :meth:`.VideoProcessor.one_video`; the last stretch may have fewer frames."""
        height, width = frames.shape[1:3]
        size = self.bounded((height, width), self._most_of_frame, self._side_of_frame)
        fitted = [self.fitted(frame, size) for frame in frames]
        values = np.concatenate([self._patches(self._video_numbers(frame)) for frame in fitted])
        rows, columns = (length // self._patch for length in fitted[0].shape[:2])
        firsts = range(0, len(frames), self._frames)
        grids = [(min(self._frames, len(frames) - first), rows, columns) for first in firsts]
        inputs = {PIXEL_VALUES_VIDEOS: packed(values), GRID: packed(np.array(grids, np.int64))}
        times = _times(len(frames), metadata)[:: self._frames]
        vectors = [self.placeholder_id] * (rows * columns // self._merge**2)
        stretch = [*self._words.ids(_BEGIN), *vectors, self._words.number(_END)]
        return self.introduced(inputs, times, stretch)

    def largest_video(self, num_frames: int, num_tokens: int) -> tuple[int, int, int]:
        stretches = min(-(-num_frames // self._frames), num_tokens)
        longest = self._side_of_frame * self._patch
        height, width = self.largest_within(self._most_of_frame, longest, self._per_stretch)
        if self._per_stretch((height, width)) > num_tokens // stretches:
            most = min(self._most_of_frame // self._merge**2, num_tokens // stretches)
            height, width = near_square(most, self._patch * self._merge)
        return min(num_frames, stretches * self._frames), height, width

    def _per_stretch(self, size: Size) -> int:
        """Vectors of a stretch of frames of a size."""
        unit = self._patch * self._merge
        fitted = self.bounded(size, self._most_of_frame, self._side_of_frame)
        return math.prod(self.up(length) // unit for length in fitted)


def _times(count: int, metadata: Mapping[str, Any]) -> list[str]:
    """Of each frame, with thousandths of a second."""
    rate = metadata.get("fps") or FRAME_RATE
    seconds = [index / rate for index in metadata.get("frames_indices") or range(count)]
    return [
        time.strftime("%H:%M:%S", time.gmtime(at)) + f".{int(at % 1 * 1000):03d}" for at in seconds
    ]
