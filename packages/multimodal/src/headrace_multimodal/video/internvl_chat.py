"""Videos of InternVL as published: each frame in one tile, behind its number in the text.

Chen et al. 2024, arXiv:2404.16821.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, ClassVar

import numpy as np

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.internvl_chat import InternVLChatProcessor
from headrace_multimodal.images.processor import packed
from headrace_multimodal.images.steps import resized
from headrace_multimodal.images.vocabulary import special_token_id
from headrace_multimodal.images.words import widened
from headrace_multimodal.video.processor import PIXEL_VALUES_VIDEOS, Frames, VideoProcessor


class InternVLChatVideos(VideoProcessor, InternVLChatProcessor):
    """``pixel_values_videos`` are [frames, 3, side, side].

    Prompts have ``<video>`` for a video, which is text and no token, or the token ``<|video_pad|>``; a
    tokenizer without that token is one of a model that was not trained on videos.
    """

    video_text = "<|video_pad|>"
    written_video: ClassVar[str] = "<video>"

    def find_video_placeholder(self) -> int | None:
        try:
            return special_token_id(self.path, self.video_text)
        except UnsupportedModel:
            return None

    def one_video(
        self, frames: Frames, metadata: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ProcessedMedia:
        tiles = [resized(frame, self._side, self._side) for frame in frames]
        values = np.stack([self._numbers(tile) for tile in tiles])
        tokens: list[int] = []
        for index in range(len(frames)):
            tokens += self._words.ids(f"\nFrame{index + 1}: ") if index else []
            tokens += [self._begin, self.placeholder_id, self._end]
        ids, runs = widened(tokens, self.placeholder_id, self._per_tile)
        return ProcessedMedia({PIXEL_VALUES_VIDEOS: packed(values)}, len(ids), ids, runs)

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """The first frame's number becomes one text with what stands before the video."""
        video, videos = (
            self.video_placeholder_id,
            [x for x in media if PIXEL_VALUES_VIDEOS in x.inputs],
        )
        if len(videos) < len(media) and self.placeholder_id not in token_ids:
            token_ids = self._words.replaced(token_ids, self.written, self.placeholder_id)
        if videos and video is not None:
            if video not in token_ids:
                token_ids = self._words.replaced(token_ids, self.written_video, video)
            token_ids = self._words.with_text_before(token_ids, video, repeat("Frame1: "))
        return super().place(token_ids, media)

    def largest_video(self, num_frames: int, num_tokens: int) -> tuple[int, int, int]:
        return max(1, min(num_frames, num_tokens // self._per_tile)), self._side, self._side
