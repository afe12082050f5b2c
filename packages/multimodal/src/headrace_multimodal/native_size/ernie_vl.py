"""Images and videos of ERNIE 4.5 VL: Qwen2-VL's, in patches of one frame, and times drawn into frames. Two
frames make a vector.

Baidu 2025, ERNIE 4.5 technical report, section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.processor import part, token_id
from headrace_multimodal.images.words import Words
from headrace_multimodal.native_size.drawn_times import drawn_times, has_font
from headrace_multimodal.video.processor import PIXEL_VALUES_VIDEOS, Frames
from headrace_multimodal.video.qwen_vl import FRAME_RATE, Qwen2VLVideos

_IMAGE, _VIDEO = "<|image@placeholder|>", "<|video@placeholder|>"
_VIDEO_TOKEN = 103_367
_FRAMES = 2
"""Frames of a vector."""


class Ernie4_5VLProcessor(Qwen2VLVideos):
    """Prompts have placeholders that need be no tokens, or the tokens of vectors. A checkpoint without the
    font in which times are drawn takes images only."""

    text = f"<|IMAGE_START|>{_IMAGE}<|IMAGE_END|>"
    video_text = f"<|VIDEO_START|>{_VIDEO}<|VIDEO_END|>"
    image_bounds = (56 * 56, 28 * 28 * 6177)
    bounds = (299 * 28 * 28, 1196 * 28 * 28)

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._frames = 1
        size = part(self.video_stated, "size")
        edges = zip(("shortest_edge", "longest_edge"), self.bounds, strict=True)
        self._least_video, self._most_video = (int(size.get(key) or own) for key, own in edges)
        self._words = Words(path)
        self._draw = None
        if self.video_placeholder_id is not None:
            self._draw = drawn_times(self.video_stated, path)

    def find_placeholder(self) -> int:
        return token_id(self.config, "image_token_id", "im_patch_id")

    def find_video_placeholder(self) -> int | None:
        if not has_font(self.video_stated, self.path):
            return None
        stated = {"video_token_id": _VIDEO_TOKEN, **self.config}
        return token_id(stated, "video_token_id")

    def refuse_settings(self, **only: object) -> None:
        """Two frames make a vector in the model, whatever settings say of patches."""
        only.pop("temporal_patch_size", None)
        super().refuse_settings(**only)

    def one_video(
        self, frames: Frames, metadata: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ProcessedMedia:
        """See :meth:`Qwen2VLVideos.one_video`; the last of an odd number of frames is there twice."""
        if self._draw is not None:
            rate = metadata.get("fps") or FRAME_RATE
            indices = metadata.get("frames_indices") or range(len(frames))
            frames = self._draw(frames, [index / rate for index in indices])
        missing = -len(frames) % _FRAMES
        frames = np.concatenate([frames, *[frames[-1:]] * missing])
        return super().one_video(frames, metadata, options)

    def with_tokens(
        self,
        inputs: Mapping[str, Any],
        grid: tuple[int, int, int],
        count: int,
        metadata: Mapping[str, Any],
    ) -> ProcessedMedia:
        number, placeholder = (
            math.prod(grid) // self._merge**2 // _FRAMES,
            self.video_placeholder_id,
        )
        assert placeholder is not None
        return ProcessedMedia(inputs, number, (placeholder,) * number)

    def largest_video(self, num_frames: int, num_tokens: int) -> tuple[int, int, int]:
        whole = num_frames + num_frames % _FRAMES
        count, height, width = super().largest_video(whole, num_tokens * _FRAMES)
        return min(count, num_frames), height, width

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        kinds = {PIXEL_VALUES_VIDEOS in item.inputs for item in media}
        for is_video, text, number in (
            (False, _IMAGE, self.placeholder_id),
            (True, _VIDEO, self.video_placeholder_id),
        ):
            if is_video in kinds and number is not None and number not in token_ids:
                token_ids = self._words.replaced(token_ids, text, number)
        return super().place(token_ids, media)
