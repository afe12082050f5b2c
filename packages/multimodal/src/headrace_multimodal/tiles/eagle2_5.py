"""Images of Eagle 2.5: cut into tiles by the rule of Nemotron Nano VL, each image behind a text that says its
number; and videos, each frame one tile behind its time.

Chen et al. 2025, arXiv:2504.15271, section 3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.images.internvl import tile_option
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import (
    PIXEL_VALUES,
    packed,
    part,
    token_id,
)
from headrace_multimodal.images.steps import HALVES, Numbers, resized
from headrace_multimodal.images.vocabulary import special_token_id
from headrace_multimodal.tiles.nemotron_vl import grid_of, in_tiles
from headrace_multimodal.tiles.pieces import PromptPieces, numbered
from headrace_multimodal.video.introduced import IntroducedVideo, IntroducedVideos
from headrace_multimodal.video.processor import PIXEL_VALUES_VIDEOS, Frames

LEAST, MOST = "min_dynamic_tiles", "max_dynamic_tiles"
_MARK = re.compile(r"<(image|video)-(\d+)>|<IMG_CONTEXT>")
_MOST_TILES = 1 << 10
_ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth",
)  # fmt: skip
"""What videos of a prompt are called."""


class Eagle25Processor(IntroducedVideos):
    """A token for each vector of each tile, between one of begin and one of end. ``pixel_values`` are
    [tiles, 3, side, side], of videos ``pixel_values_videos``.

    Prompts have ``<image-1>``, ``<video-1>`` and so on, by the items' numbers, which are text and no tokens;
    or the token of a vector, for the next image. What says an item's number becomes tokens together with
    what stands before it.
    """

    text = "<IMG_CONTEXT>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        vision = part(config, "vision_config")
        self._side, patch = vision.get("image_size", 224), vision.get("patch_size", 16)
        if not (type(self._side) is int and type(patch) is int and 0 < patch <= self._side <= 4096):
            raise UnsupportedModel(
                f"config.json: vision_config.image_size = {self._side!r}, patch_size = {patch!r}: must be "
                "sizes"
            )
        self._check(self.stated)
        ratio = config.get("downsample_ratio", 0.5)
        if type(ratio) not in (int, float) or not 0 < ratio <= 1:
            raise UnsupportedModel(
                f"config.json: downsample_ratio = {ratio!r}: must be a number up to 1"
            )
        self._per_tile = int((self._side // patch) ** 2 * ratio**2)
        self._least, self._most = self._bound(LEAST, 1), self._bound(MOST, 12)
        self._has_whole = bool(self.stated.get("use_thumbnail", True))
        self._numbers = Numbers.of(self.stated, HALVES, HALVES)
        self._begin, self._end = (special_token_id(path, name) for name in ("<img>", "</img>"))
        self._pieces = PromptPieces(path)
        self._pieces.words.check(**{self.text: self.placeholder_id})

    def find_placeholder(self) -> int:
        """The token of a vector."""
        return token_id(self.config, "image_token_index")

    def placeholder(self, modality: Modality, index: int) -> str:
        return f"<{modality}-{index + 1}>"

    def options(self) -> Sequence[str]:
        return (LEAST, MOST)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: an option is no number of tiles, or more than the settings allow."""
        most = tile_option(options, MOST, self._most, self._most)
        least = tile_option(options, LEAST, min(self._least, most), most)
        grid = grid_of(pixels.shape[:2], self._side, most, least)
        tiles = in_tiles(pixels, grid, self._side, with_whole=self._has_whole)
        x = np.stack([self._numbers(tile) for tile in tiles])
        count = len(x) * self._per_tile
        tokens = (self._begin, *[self.placeholder_id] * count, self._end)
        return ProcessedMedia({PIXEL_VALUES: packed(x)}, count + 2, tokens, ((1, count),))

    def one_video(
        self, frames: Frames, metadata: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ProcessedMedia:
        side = self._side
        values = np.stack([self._numbers(resized(frame, side, side)) for frame in frames])
        tile = [self._begin, *[self.placeholder_id] * self._per_tile, self._end]
        rate, sampled = _rates(len(frames), metadata)
        indices = metadata.get("frames_indices") or range(len(frames))
        times = [f" sample at {index / rate:.2f}s" if rate else "" for index in indices]
        first, *others = [f"Frame {number}{time}: " for number, time in enumerate(times, 1)]
        said = f" sampled with {sampled:.2f} fps" if sampled else ""
        texts = [f" video{said}: {first}", *others]
        return self.introduced({PIXEL_VALUES_VIDEOS: packed(values)}, texts, tile)

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Raises: RequestError: items and their marks are not of the same numbers, or there are more videos
        than the model has words for."""
        if not media:
            return super().place(token_ids, media)
        text = self._pieces.text(token_ids)
        matches = list(_MARK.finditer(text))
        found: list[int] = []
        offsets, done = [-1] * len(media), 0
        for match, (index, number) in zip(matches, _order(matches, media), strict=True):
            words = _words(media[index], number)
            found += self._pieces.words.ids(f"{text[done : match.start()]}{words}")
            offsets[index], done = len(found), match.end()
            found += media[index].token_ids
        return MediaPlacement(found + self._pieces.words.ids(text[done:]), offsets)

    def largest_video(self, num_frames: int, num_tokens: int) -> tuple[int, int, int]:
        return max(1, min(num_frames, num_tokens // self._per_tile)), self._side, self._side

    def largest_size(self) -> tuple[int, int]:
        """The size of as many tiles as are cut, side by side."""
        return self._side, self._side * self._most

    def _check(self, stated: Mapping[str, Any]) -> None:
        """Raises: UnsupportedModel: settings make tiles of another size, or of another kind."""
        if stated.get("pad_during_tiling"):
            raise UnsupportedModel(
                "image processor: pad_during_tiling = True: must be false; images take the shape of "
                "their grid"
            )
        for key in ("size", "crop_size"):
            size = stated.get(key)
            if size is not None and size != {"height": self._side, "width": self._side}:
                raise UnsupportedModel(
                    f"image processor: {key} = {size!r}: the tower takes images of {self._side}"
                )

    def _bound(self, key: str, default: int) -> int:
        value = self.stated.get(key, default)
        if type(value) is not int or not 0 < value <= _MOST_TILES:
            raise UnsupportedModel(
                f"image processor: {key} = {value!r}: must be a number from 1 to {_MOST_TILES}"
            )
        return value


def _rates(count: int, metadata: Mapping[str, Any]) -> tuple[float, float]:
    """Frames a second of a file, and of those that are taken; 0: nobody knows."""
    rate, total = metadata.get("fps") or 0.0, metadata.get("total_num_frames")
    return rate, count / total * rate if total else rate


def _order(
    matches: Sequence[re.Match[str]], media: Sequence[ProcessedMedia]
) -> list[tuple[int, int]]:
    """Of each mark, the item's index and its number among those of its kind, from 0.

    Raises: RequestError: they are not each item once.
    """
    found: dict[int, tuple[int, int]] = {}
    for is_video in (False, True):
        items = [i for i, own in enumerate(media) if isinstance(own, IntroducedVideo) is is_video]
        marks = [i for i, match in enumerate(matches) if (match[1] == "video") is is_video]
        order = numbered([matches[mark][2] for mark in marks], len(items))
        found |= {mark: (items[number], number) for mark, number in zip(marks, order, strict=True)}
    return [found[mark] for mark in range(len(matches))]


def _words(item: ProcessedMedia, number: int) -> str:
    """What stands in front of an item.

    Raises: RequestError: there are more videos than words.
    """
    if not isinstance(item, IntroducedVideo):
        return f"<image {number + 1}>"
    if number >= len(_ORDINALS):
        raise RequestError(
            f"{number + 1} videos: this model takes at most {len(_ORDINALS)} in a prompt",
            param="multi_modal_data.video",
        )
    return f"The {_ORDINALS[number]}{item.intro}"
