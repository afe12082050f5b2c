"""Molmo 2's images, a small picture of the whole and crops that overlap; and its videos, frames behind their
times.

Ai2 2025, Molmo 2. Pictures are stretched to sizes of crops, by torch's bilinear resampling without
antialiasing. Letters: H height, W width, V vectors, P patches that become one vector.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, packed
from headrace_multimodal.images.settings import processor_settings
from headrace_multimodal.images.steps import BILINEAR, HALVES, Float, Numbers, two_sizes
from headrace_multimodal.images.vocabulary import named_token, special_token_id
from headrace_multimodal.images.words import Words
from headrace_multimodal.own_ways.resampling import stretched
from headrace_multimodal.video.processor import PIXEL_VALUES_VIDEOS, Frames, VideoProcessor

MOST = "max_crops"
_MOST_CROPS = 1 << 8
_MARKS = ("<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>", "<frame_start>", "<im_end>",
          "<frame_end>")  # fmt: skip
"""Tokens of pictures, all of which see each other."""
_MOST_TEXT = 12
"""Tokens of a frame's time, at most."""
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cutting:
    """How images are cut: all in patches."""

    side: int
    """Of a crop."""
    before: int
    after: int
    """Of a crop's sides: left out, but at the image's own edges."""
    patch: int
    """Pixels of a patch's side."""

    @property
    def margin(self) -> int:
        return self.before + self.after

    @property
    def window(self) -> int:
        """From a crop to the next."""
        return self.side - self.margin

    def pixels(self, crops: int) -> int:
        """Of a side of so many crops."""
        return (crops * self.window + self.margin) * self.patch

    def places(self, grid: tuple[int, int]) -> Ints:
        """[rows, columns] of an image's patches: each one's index among those of all crops."""
        rows, columns = grid
        every = np.arange(rows * columns * self.side**2).reshape(rows, columns, *[self.side] * 2)
        kept = (
            [self._kept(i, rows) for i in range(rows)],
            [self._kept(j, columns) for j in range(columns)],
        )
        lines = [
            np.concatenate([every[i, j, high, wide] for j, wide in enumerate(kept[1])], axis=1)
            for i, high in enumerate(kept[0])
        ]
        return np.concatenate(lines)

    def _kept(self, index: int, crops: int) -> slice:
        """Patches of a crop's side that are read."""
        first = 0 if index == 0 else self.before
        return slice(first, self.side if index == crops - 1 else self.side - self.after)


@dataclass(frozen=True, slots=True)
class TimedFrames(ProcessedMedia):
    """A video whose tokens begin with its first frame's; the time in front of it is one text with what
    stands before."""

    time: str = ""


class Molmo2Processor(VideoProcessor):
    """``pixel_values`` are [crops, patches, patch * patch * 3], the whole first, of videos a frame each in
    ``pixel_values_videos``; ``squares`` [V, P] int64: the patches of each vector, -1: none there;
    ``patch_token`` [1] int64.

    A prompt has images, or one video. All its pictures see each other.
    """

    text, video_text = "<|image|>", "<|video|>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._cutting = _cutting(self.stated)
        self._pool = _pooling(self.stated, (2, 2))
        self._video_cutting = _cutting(self.video_stated)
        self._video_pool = _pooling(self.video_stated, (3, 3))
        self._most = _number(self.stated, MOST, 8, _MOST_CROPS)
        self._rate = self.video_stated.get("max_fps", 2)
        self._numbers = Numbers.of(self.stated, HALVES, HALVES)
        self._video_numbers = Numbers.of(self.video_stated, HALVES, HALVES)
        self._words = Words(path)
        self._ids = {token: special_token_id(path, token) for token in _MARKS}
        ends = named_token(path, "eos_token", "<|im_end|>")
        self._first = special_token_id(path, named_token(path, "bos_token", ends))
        self._style = _Style.of(processor_settings(path))
        self._layout = lru_cache(maxsize=64)(self._laid)

    def find_placeholder(self) -> int:
        return special_token_id(self.path, self.text)

    def find_video_placeholder(self) -> int | None:
        return special_token_id(self.path, self.video_text)

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """Tokens that may be written for an item, and those of pictures."""
        return (*super().placeholder_ids, *self._ids.values())

    def options(self) -> Sequence[str]:
        return (MOST,)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: the option is no number of crops that the model's settings allow."""
        most = options.get(MOST, self._most)
        if type(most) is not int or not 0 < most <= self._most:
            raise RequestError(
                f"mm_processor_kwargs.{MOST} = {most!r}: must be a number of crops from 1 to {self._most}",
                param="mm_processor_kwargs",
            )
        cutting = self._cutting
        margin = cutting.margin * cutting.patch
        height, width = pixels.shape[0] - margin, pixels.shape[1] - margin
        grid = tiling(height, width, cutting.window * cutting.patch, most)
        ids, runs, squares = self._layout(grid)
        inputs = {
            PIXEL_VALUES: packed(self._crops(pixels, grid)),
            "squares": packed(squares),
            "patch_token": packed(np.array([self._ids["<im_patch>"]])),
        }
        return ProcessedMedia(inputs, len(ids), ids, runs)

    def one_video(
        self, frames: Frames, metadata: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ProcessedMedia:
        cutting = self._video_cutting
        side, number = cutting.pixels(1), cutting.side**2
        values = [
            in_patches(self._video_numbers(stretched(frame, side, side)), cutting.patch)
            for frame in frames
        ]
        squares = pooled(np.arange(number).reshape(cutting.side, cutting.side), self._video_pool)
        every = [np.where(squares < 0, -1, squares + i * number) for i in range(len(frames))]
        begin, row, end = self._style.frame(squares.shape[1], self._ids)
        rate = metadata.get("fps") or self._rate
        indices = metadata.get("frames_indices") or range(len(frames))
        first, *times = [f"{index / rate:.1f} " for index in indices]
        ids: list[int] = []
        runs: list[tuple[int, int]] = []
        for time in ("", *times):
            ids += self._words.ids(f" {time}") if time else ()
            self._picture(ids, runs, (begin, row, end), *squares.shape[:2])
        inputs = {
            PIXEL_VALUES_VIDEOS: packed(np.stack(values)),
            "squares": packed(np.stack(every).reshape(-1, squares.shape[-1])),
            "patch_token": packed(np.array([self._ids["<im_patch>"]])),
        }
        return TimedFrames(inputs, len(ids), tuple(ids), tuple(runs), first)

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Raises: RequestError: a video is not the only item; or as
        :func:`headrace_multimodal.placeholders.expanded_by_kind`."""
        films = [one for one in media if isinstance(one, TimedFrames)]
        if films and len(media) > 1:
            raise RequestError(
                f"multi_modal_data: {len(media)} items with a video among them: this model takes one video, "
                "or images",
                param="multi_modal_data",
            )
        if films and self.video_placeholder_id is not None:
            around = [(one.time, "") for one in films]
            mark = self.video_placeholder_id
            token_ids = self._words.with_text_around(token_ids, self.video_text, around, mark)
        if media and list(token_ids[:1]) != [self._first]:
            token_ids = [self._first, *token_ids]
        placed = super().place(token_ids, media)
        bounds = self._bounds(placed, media)
        return placed._replace(whole_spans=(bounds,) if bounds else ())

    def largest_size(self) -> tuple[int, int]:
        """As many crops as are cut, one below the other: most rows have most ends."""
        return self._cutting.pixels(self._most), self._cutting.pixels(1)

    def largest_video(self, num_frames: int, num_tokens: int) -> tuple[int, int, int]:
        side = self._video_cutting.pixels(1)
        each = -(-self._video_cutting.side // min(self._video_pool)) + 1
        most = num_tokens // (each**2 + _MOST_TEXT)
        return max(1, min(num_frames, most)), side, side

    def _bounds(self, placed: MediaPlacement, media: Sequence[ProcessedMedia]) -> tuple[int, ...]:
        """Of what sees each other: pictures, without the times between them."""
        marks = set(self._ids.values())
        found: list[int] = []
        for offset, item in sorted(zip(placed.offsets, media, strict=True), key=lambda x: x[0]):
            for is_mark, run in itertools.groupby(
                range(item.num_tokens), key=lambda i: item.token_ids[i] in marks
            ):
                places = list(run)
                if is_mark:
                    found += [offset + places[0], offset + places[-1] + 1]
        return tuple(found)

    def _crops(self, pixels: Pixels, grid: tuple[int, int]) -> Float:
        """The numbers of the whole and of all crops."""
        cutting = self._cutting
        side, step = cutting.pixels(1), cutting.window * cutting.patch
        own = self._numbers(stretched(pixels, side, side))
        large = self._numbers(stretched(pixels, cutting.pixels(grid[0]), cutting.pixels(grid[1])))
        corners = itertools.product(*(range(0, n * step, step) for n in grid))
        cut = [own, *(large[:, y : y + side, x : x + side] for y, x in corners)]
        return np.stack([in_patches(crop, cutting.patch) for crop in cut])

    def _laid(
        self, grid: tuple[int, int]
    ) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], Ints]:
        """Tokens of an image in so many rows and columns of crops, the runs that take vectors, and the
        patches of these."""
        side = self._cutting.side
        whole = pooled(np.arange(side**2).reshape(side, side), self._pool)
        large = pooled(self._cutting.places(grid) + side**2, self._pool)
        ids: list[int] = []
        runs: list[tuple[int, int]] = []
        self._picture(ids, runs, self._style.small(whole.shape[1], self._ids), *whole.shape[:2])
        self._picture(ids, runs, self._style.large(large.shape[1], self._ids), *large.shape[:2])
        squares = [x.reshape(-1, x.shape[-1]) for x in (whole, large)]
        return tuple(ids), tuple(runs), np.concatenate(squares)

    def _picture(
        self,
        ids: list[int],
        runs: list[tuple[int, int]],
        style: tuple[int, Sequence[int], int],
        rows: int,
        columns: int,
    ) -> None:
        """Append a picture's tokens, and its runs of vectors."""
        begin, row, end = style
        ids.append(begin)
        if len(row) == columns:
            runs.append((len(ids), rows * columns))
        else:
            runs += [(len(ids) + i * len(row), columns) for i in range(rows)]
        ids += [*row] * rows + [end]


@dataclass(frozen=True, slots=True)
class _Style:
    """Tokens around a picture's vectors, as ``processor_config.json`` says."""

    large_ends: bool
    small_ends: bool
    frame_ends: bool
    small_begin: str
    frame_begin: str
    frame_end: str

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> _Style:
        """Raises: UnsupportedModel: a setting is no flag."""
        large = _flag(stated, "image_use_col_tokens", True)
        small = _flag(stated, "use_single_crop_col_tokens", large)
        own = _flag(stated, "use_frame_special_tokens", True)
        begins = _flag(stated, "use_single_crop_start_token", True)
        return cls(
            large,
            small,
            _flag(stated, "video_use_col_tokens", False),
            "<low_res_im_start>" if begins else "<im_start>",
            "<frame_start>" if own else "<im_start>",
            "<frame_end>" if own else "<im_end>",
        )

    def small(self, columns: int, ids: Mapping[str, int]) -> tuple[int, Sequence[int], int]:
        """(token in front, those of a row, token behind) of the picture of the whole."""
        return ids[self.small_begin], _row(columns, self.small_ends, ids), ids["<im_end>"]

    def large(self, columns: int, ids: Mapping[str, int]) -> tuple[int, Sequence[int], int]:
        return ids["<im_start>"], _row(columns, self.large_ends, ids), ids["<im_end>"]

    def frame(self, columns: int, ids: Mapping[str, int]) -> tuple[int, Sequence[int], int]:
        return ids[self.frame_begin], _row(columns, self.frame_ends, ids), ids[self.frame_end]


def _row(columns: int, ends: bool, ids: Mapping[str, int]) -> list[int]:
    return [*[ids["<im_patch>"]] * columns, *([ids["<im_col>"]] if ends else ())]


def pooled(places: Ints, pool: tuple[int, int]) -> Ints:
    """places [rows, columns] of patches -> [squares' rows, their columns, P]; -1 where a square goes over an
    edge, as much on either side, one more behind."""
    around = [
        (missing // 2, -(-missing // 2))
        for missing in (-n % p for n, p in zip(places.shape, pool, strict=True))
    ]
    whole = np.pad(places, around, constant_values=-1)
    rows, columns = whole.shape[0] // pool[0], whole.shape[1] // pool[1]
    cut = whole.reshape(rows, pool[0], columns, pool[1]).transpose(0, 2, 1, 3)
    return cut.reshape(rows, columns, -1).astype(np.int64)


def in_patches(image: Float, patch: int) -> Float:
    """[3, H, W] -> [patches, patch * patch * 3], row by row."""
    _, height, width = image.shape
    cut = image.reshape(3, height // patch, patch, width // patch, patch)
    return np.ascontiguousarray(cut.transpose(1, 3, 2, 4, 0).reshape(-1, patch * patch * 3))


def tiling(height: int, width: int, window: int, most: int) -> tuple[int, int]:
    """Rows and columns of windows that an image need grow least for, or shrink least; of equals the fewest.
    Of an image within the margins a side is negative or 0, which the rule takes as it comes."""
    numbers = range(1, most + 1)
    grids = [(r, c) for r in numbers for c in numbers if r * c <= most]
    grids.sort(key=lambda grid: (grid[0] * grid[1], grid[0]))
    with np.errstate(divide="ignore"):
        scales = (np.array(grids) * window).astype(np.float32) / np.array(
            (height, width), np.float32
        )
    least = scales.min(axis=1)
    if not (least < 1).all():
        return grids[int(np.where(least < 1, np.float32(10e9), least).argmin())]
    return grids[int(least.argmax())]


def _cutting(stated: Mapping[str, Any]) -> Cutting:
    height, width = two_sizes(stated.get("size", {"height": 378, "width": 378}), "size")
    patch = _number(stated, "patch_size", 14)
    if height != width or height % patch:
        raise UnsupportedModel(
            f"image processor: size = {height} x {width}: must be two equal multiples of {patch}"
        )
    if int(stated.get("resample", BILINEAR)) != BILINEAR:
        raise UnsupportedModel(f"image processor: resample = {stated['resample']!r}: must be 2")
    margins = stated.get("overlap_margins", (4, 4))
    side = height // patch
    if not _are_sizes(margins, 0) or sum(margins) >= side:
        raise UnsupportedModel(
            f"image processor: overlap_margins = {margins!r}: must be two numbers of patches, less than "
            f"{side} together"
        )
    return Cutting(side, margins[0], margins[1], patch)


def _pooling(stated: Mapping[str, Any], default: tuple[int, int]) -> tuple[int, int]:
    value = stated.get("pooling_size", default)
    if not _are_sizes(value, 1):
        raise UnsupportedModel(f"image processor: pooling_size = {value!r}: must be two numbers")
    return value[0], value[1]


def _are_sizes(value: object, least: int) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) == 2
        and all(type(x) is int and least <= x <= 1 << 14 for x in value)
    )


def _number(stated: Mapping[str, Any], key: str, default: int, most: int = 1 << 14) -> int:
    value = stated.get(key, default)
    if type(value) is not int or not 0 < value <= most:
        raise UnsupportedModel(
            f"image processor: {key} = {value!r}: must be a number from 1 to {most}"
        )
    return value


def _flag(stated: Mapping[str, Any], key: str, default: bool) -> bool:
    value = stated.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UnsupportedModel(f"processor_config.json: {key} = {value!r}: must be true or false")
    return value
