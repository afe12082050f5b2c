"""Images and videos of Ovis 2.5: patches as Qwen2-VL's, of single frames, between two marks that take vectors
as well.

Lu et al. 2025, arXiv:2508.11737.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, packed, part
from headrace_multimodal.images.qwen_vl import GRID as IMAGE_GRID
from headrace_multimodal.images.qwen_vl import MAX_ASPECT, QwenVLProcessor, near_square
from headrace_multimodal.images.steps import HALVES, Numbers, resized
from headrace_multimodal.images.vocabulary import special_token_id
from headrace_multimodal.images.words import Words
from headrace_multimodal.video.processor import PIXEL_VALUES_VIDEOS, Frames, VideoProcessor
from headrace_multimodal.video.qwen_vl import GRID as VIDEO_GRID

_IMAGE, _VIDEO = "<|image_pad|>", "<|video_pad|>"
"""Tokens of Qwen3 that the model does not use otherwise."""
_MARKS = 2
Grid = tuple[int, int, int]


class Ovis25Processor(VideoProcessor, QwenVLProcessor):
    """Prompts have ``<image>`` and ``<video>``, which are text and no tokens, or tokens that the vocabulary
    does not use otherwise; these stand in place of vectors."""

    text = "<image>"
    video_text = "<video>"
    image_bounds = (448 * 448, 1344 * 1792)

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        tower = part(config, "vit_config")
        vision = {
            "patch_size": tower.get("patch_size", 16),
            "temporal_patch_size": tower.get("temporal_patch_size", 1),
            "spatial_merge_size": tower.get("hidden_stride", 2),
        }
        super().__init__({**config, "vision_config": vision}, path)
        self._numbers, self._words = Numbers.of(self.stated, HALVES, HALVES), Words(path)

    def find_placeholder(self) -> int:
        return special_token_id(self.path, _IMAGE)

    def find_video_placeholder(self) -> int | None:
        try:
            return special_token_id(self.path, _VIDEO)
        except UnsupportedModel:
            return None

    def placeholder(self, modality: Modality, index: int) -> str:
        """The token, which no text around it changes."""
        return _VIDEO if modality == "video" else _IMAGE

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: the image is too narrow, or an option is no size."""
        values, grid = self._cut(pixels[None], options)
        inputs = {PIXEL_VALUES: packed(values), IMAGE_GRID: packed(np.array(grid, np.int64))}
        return self._between_marks(inputs, grid, self.placeholder_id)

    def one_video(
        self, frames: Frames, metadata: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ProcessedMedia:
        values, grid = self._cut(frames, options)
        inputs = {PIXEL_VALUES_VIDEOS: packed(values), VIDEO_GRID: packed(np.array(grid, np.int64))}
        assert self.video_placeholder_id is not None
        return self._between_marks(inputs, grid, self.video_placeholder_id)

    def embedded(
        self, modality: Modality, num_vectors: int, facts: Mapping[str, Any]
    ) -> ProcessedMedia:
        """An image of the stated grid; its vectors are those of the marks, too."""
        made = super().embedded(modality, num_vectors, facts)
        number = made.num_tokens + _MARKS
        return ProcessedMedia(made.inputs, number, (self.placeholder_id,) * number)

    def image_size(self, size: tuple[int, ...], limits: tuple[int, int]) -> tuple[int, int]:
        """Raises: RequestError: the image is so narrow that nothing of it would be left."""
        factor, (least, most) = self._patch * self._merge, limits
        height, width = _wide_enough((size[0], size[1]), factor)
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor**2 > most:
            shrink = math.sqrt(height * width / most)
            rows, columns = (math.floor(x / shrink / factor) for x in (height, width))
        elif rows * columns * factor**2 < least:
            grow = math.sqrt(least / (height * width))
            rows, columns = (math.ceil(x * grow / factor) for x in (height, width))
        if not rows or not columns:
            raise RequestError(
                f"image of {size[1]} x {size[0]} pixels: is too narrow for {most} pixels at most",
                param="multi_modal_data",
            )
        return rows * factor, columns * factor

    def largest_video(self, num_frames: int, num_tokens: int) -> tuple[int, int, int]:
        factor = self._patch * self._merge
        least = -(-self._least // factor**2)
        count = max(1, min(num_frames, (num_tokens - _MARKS) // least))
        most = min(self._most // factor**2, (num_tokens - _MARKS) // count)
        return count, *near_square(most, factor)

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded_by_kind`."""
        kinds = {PIXEL_VALUES_VIDEOS in item.inputs for item in media}
        for is_video, text, number in (
            (False, self.text, self.placeholder_id),
            (True, self.video_text, self.video_placeholder_id),
        ):
            if is_video in kinds and number is not None and number not in token_ids:
                token_ids = self._words.replaced(token_ids, text, number)
        return super().place(token_ids, media)

    def _cut(self, frames: Frames, options: Mapping[str, Any]) -> tuple[np.ndarray[Any, Any], Grid]:
        """Patches, frame by frame and square by square, and their grid."""
        height, width = self.image_size(frames.shape[1:3], self.image_limits(options))
        grid = len(frames), height // self._patch, width // self._patch
        fitted = [resized(frame, height, width, self._resample) for frame in frames]
        made = [self._patches(self._numbers(frame), *grid[1:]) for frame in fitted]
        return np.concatenate(made), grid

    def _between_marks(
        self, inputs: Mapping[str, Any], grid: Grid, placeholder: int
    ) -> ProcessedMedia:
        number = math.prod(grid) // self._merge**2 + _MARKS
        return ProcessedMedia(inputs, number, (placeholder,) * number)


def _wide_enough(size: tuple[int, int], factor: int) -> tuple[int, int]:
    """A size of which no side is shorter than a token's, or else none longer than :data:`MAX_ASPECT` times
    the other."""
    height, width = size
    if min(size) >= factor:
        return min(height, MAX_ASPECT * width), min(width, MAX_ASPECT * height)
    if height < width:
        return factor, round(factor / height * width)
    return round(factor / width * height), factor
