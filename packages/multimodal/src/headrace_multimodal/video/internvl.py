"""Videos of InternVL: each frame in one tile, behind its number in the text.

Chen et al. 2024, arXiv:2404.16821.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.internvl import InternVLProcessor
from headrace_multimodal.images.processor import packed
from headrace_multimodal.images.steps import BICUBIC, Numbers, resized, two_sizes
from headrace_multimodal.images.vocabulary import named_token, special_token_id
from headrace_multimodal.images.words import Words, widened
from headrace_multimodal.video.processor import (
    PIXEL_VALUES_VIDEOS,
    Frames,
    VideoProcessor,
)


class InternVLVideos(VideoProcessor, InternVLProcessor):
    """``pixel_values_videos`` are [frames, 3, height, width]."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        stated = self.video_stated
        self.refuse_settings(do_resize=True, do_center_crop=False)
        self._words, self._video_numbers = Words(path), Numbers.of(stated)
        self._resample_video = int(stated.get("resample", BICUBIC))
        size = two_sizes(stated.get("size", self._tile[0]), "size")
        if self.video_placeholder_id is not None and size != self._tile:
            raise UnsupportedModel(
                f"video processor: size = {size}: the tower takes images of {self._tile}"
            )

    def find_video_placeholder(self) -> int | None:
        """A token of the vocabulary only: the model knows it by no number."""
        self.video_text = named_token(self.path, "video_token", "<video>")
        try:
            return special_token_id(self.path, self.video_text)
        except UnsupportedModel:
            return None

    def one_video(
        self, frames: Frames, metadata: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ProcessedMedia:
        tiles = [resized(frame, *self._tile, self._resample_video) for frame in frames]
        values = np.stack([self._video_numbers(tile) for tile in tiles])
        tokens: list[int] = []
        for index in range(len(frames)):
            tokens += self._words.ids(f"\nFrame{index + 1}: ") if index else []
            tokens += [self._begin, self.placeholder_id, self._end]
        ids, runs = widened(tokens, self.placeholder_id, self._per_tile)
        return ProcessedMedia({PIXEL_VALUES_VIDEOS: packed(values)}, len(ids), ids, runs)

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """The first frame's number becomes one text with what stands before the video."""
        video = self.video_placeholder_id
        if video is not None and video in token_ids:
            token_ids = self._words.with_text_before(token_ids, video, repeat("Frame1: "))
        return super().place(token_ids, media)

    def largest_video(self, num_frames: int, num_tokens: int) -> tuple[int, int, int]:
        return max(1, min(num_frames, num_tokens // self._per_tile)), *self._tile
