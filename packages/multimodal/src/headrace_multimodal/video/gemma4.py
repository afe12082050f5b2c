"""Gemma 4's images and videos: pictures of their own proportions, as large as a number of vectors allows.

Google 2026, Gemma 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, packed, part, token_id
from headrace_multimodal.images.steps import BICUBIC, Float, Numbers, resized
from headrace_multimodal.images.vocabulary import named_token
from headrace_multimodal.images.words import Words
from headrace_multimodal.video.processor import PIXEL_VALUES_VIDEOS, Frames, VideoProcessor

FRAME_RATE = 24.0
"""Frames a second of a video that says none."""
MOST, GRIDS = "max_soft_tokens", "grids"
_ACCEPTED = (70, 140, 280, 560, 1120)
_OF_IMAGES, _OF_VIDEOS = 280, 70
"""Vectors of a picture where the settings do not say how many."""
_FILM = "<|video|>"
MARK = -1
"""Stands for a video in a prompt's tokens: its text need be no token."""
_ZEROS, _ONES = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class TimedVideo(ProcessedMedia):
    """A video whose tokens begin with a special one; the time in front of it is one text with what stands
    before."""

    time: str = ""


class Gemma4Processor(VideoProcessor):
    """``pixel_values`` are [patches, patch * patch * 3] from 0 to 1, of videos ``pixel_values_videos``;
    ``grids`` [pictures, 2] int64 rows and columns of patches.

    A frame stands behind its time in the prompt.
    """

    video_text = _FILM

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._patch, self._factor = _sizes(self.stated, config)
        self._begin = token_id(config, "boi_token_id", "boi_token_index")
        self._end = token_id(config, "eoi_token_id", "eoi_token_index")
        self._most = _vectors(self.stated, _OF_IMAGES)
        self._most_video = _vectors(self.video_stated, _OF_VIDEOS)
        self._numbers = Numbers.of({"do_normalize": False, **self.stated}, _ZEROS, _ONES)
        self._video_numbers = Numbers.of(self.video_stated, _ZEROS, _ONES)
        self._resample = int(self.stated.get("resample", BICUBIC))
        self._words = Words(path)
        self.text = named_token(path, "image_token", "<|image|>")
        text = part(config, "text_config")
        self._sees_whole = text.get("use_bidirectional_attention") == "vision"
        window = text.get("sliding_window", 512)
        if self._sees_whole and max(self._most, self._most_video) > window:
            raise UnsupportedModel(
                f"image processor: {MOST} = {max(self._most, self._most_video)}: must be at most "
                f"sliding_window = {window}"
            )

    def find_video_placeholder(self) -> int | None:
        """Not the token of its vectors, which the tokenizer need not know."""
        self._film = super().find_video_placeholder()
        return None if self._film is None else MARK

    def options(self) -> Sequence[str]:
        return (MOST,)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: the option is no number that the model's settings allow."""
        values, grid = self._picture(pixels, _chosen(options, self._most), self._numbers)
        number = grid[0] * grid[1] // self._factor**2
        ids = (self._begin, *[self.placeholder_id] * number, self._end)
        inputs = {PIXEL_VALUES: packed(values), GRIDS: packed(np.array([grid]))}
        return ProcessedMedia(inputs, number + 2, ids, ((1, number),))

    def one_video(
        self, frames: Frames, metadata: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ProcessedMedia:
        """Raises: RequestError: the option is no number that the model's settings allow."""
        most, film = _chosen(options, self._most_video), self._film
        assert film is not None, "a checkpoint without that token takes images only"
        made = [self._picture(frame, most, self._video_numbers) for frame in frames]
        rate = metadata.get("fps") or FRAME_RATE
        indices = metadata.get("frames_indices") or range(len(frames))
        first, *times = [
            f"{int(s // 60):02d}:{int(s % 60):02d} " for s in (i / rate for i in indices)
        ]
        ids: list[int] = []
        runs = []
        for time, (_, grid) in zip(("", *times), made, strict=True):
            number = grid[0] * grid[1] // self._factor**2
            ids += [*(self._words.ids(f" {time}") if time else ()), self._begin]
            runs.append((len(ids), number))
            ids += [*[film] * number, self._end]
        inputs = {
            PIXEL_VALUES_VIDEOS: packed(np.concatenate([values for values, _ in made])),
            GRIDS: packed(np.array([grid for _, grid in made])),
        }
        return TimedVideo(inputs, len(ids), tuple(ids), tuple(runs), first)

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        return self.with_spans(super().place(self.marked(token_ids, media), media), media)

    def marked(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> Sequence[int]:
        """A prompt with a mark for each video; what stands before it becomes tokens together with its first
        time."""
        films = [one for one in media if isinstance(one, TimedVideo)]
        if not films:
            return token_ids
        around = [(one.time, "") for one in films]
        return self._words.with_text_around(token_ids, _FILM, around, MARK)

    def with_spans(self, placed: MediaPlacement, media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """With the pictures whose tokens see each other."""
        if not self._sees_whole:
            return placed
        spans = [
            (offset + first, offset + first + number)
            for item, offset in zip(media, placed.offsets, strict=True)
            for first, number in item.runs
            if GRIDS in item.inputs
        ]
        return placed._replace(whole_spans=spans)

    def largest_size(self) -> tuple[int, int]:
        """One row of vectors, which takes all of them."""
        side = self._patch * self._factor
        return side, side * self._most

    def largest_video(self, num_frames: int, num_tokens: int) -> tuple[int, int, int]:
        side = self._patch * self._factor
        most = num_tokens // (self._most_video + 10)
        return max(1, min(num_frames, most)), side, side * self._most_video

    def _picture(
        self, pixels: Pixels, most: int, numbers: Numbers
    ) -> tuple[Float, tuple[int, int]]:
        """Patches, and their rows and columns."""
        patch = self._patch
        height, width = fitted(pixels.shape[0], pixels.shape[1], patch, self._factor, most)
        values = numbers(resized(pixels, height, width, self._resample))
        rows, columns = height // patch, width // patch
        cut = values.reshape(3, rows, patch, columns, patch).transpose(1, 3, 2, 4, 0)
        return cut.reshape(rows * columns, -1), (rows, columns)


def fitted(height: int, width: int, patch: int, factor: int, most: int) -> tuple[int, int]:
    """The largest height and width of about an image's proportions that are of whole squares of patches, in
    ``most`` squares at most."""
    side = patch * factor
    scale = math.sqrt(most * factor**2 * patch**2 / (height * width))
    rows, columns = math.floor(scale * height / side), math.floor(scale * width / side)
    if rows == 0:
        rows, columns = 1, min(width // height, most)
    elif columns == 0:
        rows, columns = min(height // width, most), 1
    return rows * side, columns * side


def _chosen(options: Mapping[str, Any], most: int) -> int:
    value = options.get(MOST, most)
    if type(value) is not int or value not in _ACCEPTED or value > most:
        accepted = ", ".join(str(number) for number in _ACCEPTED if number <= most)
        raise RequestError(
            f"mm_processor_kwargs.{MOST} = {value!r}: must be one of {accepted}",
            param="mm_processor_kwargs",
        )
    return value


def _vectors(stated: Mapping[str, Any], default: int) -> int:
    value = stated.get(MOST, default)
    if type(value) is not int or value not in _ACCEPTED:
        accepted = ", ".join(map(str, _ACCEPTED))
        raise UnsupportedModel(f"image processor: {MOST} = {value!r}: must be one of {accepted}")
    return value


def _sizes(stated: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, int]:
    """A patch's side, and the patches of a square's."""
    vision, found = part(config, "vision_config"), []
    for key, default in (("patch_size", 16), ("pooling_kernel_size", 3)):
        value = stated.get(key, default)
        if type(value) is not int or value < 1 or vision.get(key, default) != value:
            raise UnsupportedModel(
                f"image processor: {key} = {value!r}: config.json says {vision.get(key, default)!r} for "
                "vision_config"
            )
        found.append(value)
    if not stated.get("do_resize", True):
        raise UnsupportedModel("image processor: do_resize = False: must be true")
    return found[0], found[1]
