"""Videos of Nemotron Nano V2 VL: each frame is one tile behind its time.

NVIDIA 2025, arXiv:2511.03929.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images.processor import packed
from headrace_multimodal.images.steps import resized
from headrace_multimodal.tiles.nemotron_vl import NemotronVL2Processor
from headrace_multimodal.video.introduced import IntroducedVideos
from headrace_multimodal.video.processor import PIXEL_VALUES_VIDEOS, Frames


class NemotronVL2Videos(IntroducedVideos, NemotronVL2Processor):
    """``pixel_values_videos`` are [frames, 3, side, side], normalised."""

    video_text = "<video>"

    def one_video(
        self, frames: Frames, metadata: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ProcessedMedia:
        side = self._side
        values = np.stack([self._numbers(resized(frame, side, side)) for frame in frames])
        tile = [self._begin, *[self.placeholder_id] * self._per_tile, self._end]
        return self.introduced(
            {PIXEL_VALUES_VIDEOS: packed(values)}, _texts(len(frames), metadata), tile
        )

    def largest_video(self, num_frames: int, num_tokens: int) -> tuple[int, int, int]:
        return max(1, min(num_frames, num_tokens // self._per_tile)), self._side, self._side


def _texts(count: int, metadata: Mapping[str, Any]) -> list[str]:
    """In front of each frame."""
    times = _seconds(count, metadata)
    found = [f" sampled at {at:.2f} seconds" for at in times] if times else [""] * count
    texts = [f"Frame {number}{text}: " for number, text in enumerate(found, 1)]
    return [texts[0], *(f"\n{text}" for text in texts[1:])]


def _seconds(count: int, metadata: Mapping[str, Any]) -> list[float]:
    """Of each frame; those of a file last whole milliseconds, as in the published code. []: nobody knows."""
    rate, indices = metadata.get("fps"), metadata.get("frames_indices")
    if not rate:
        return []
    if indices is None:
        return [index / rate for index in range(count)]
    return [index * int(1000 / rate) / 1000 for index in indices]
