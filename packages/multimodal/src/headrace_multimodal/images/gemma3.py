"""Gemma 3's images: of one size, between lines of their own; long ones in parts as well.

Gemma Team 2025, arXiv:2503.19786, section 2.1 ("pan and scan").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed, token_id
from headrace_multimodal.images.steps import BILINEAR, HALVES, Numbers, resized, two_sizes
from headrace_multimodal.images.words import LineEnds, Words, widened
from headrace_multimodal.placeholders import expanded

_SIZE, _TOKENS = 224, 256
SPLITS, LEAST, MOST, RATIO = (
    "do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops",
    "pan_and_scan_min_ratio_to_activate",
)  # fmt: skip
_DEFAULTS: Mapping[str, Any] = {SPLITS: False, LEAST: 256, MOST: 4, RATIO: 1.2}
_BEGIN, _IMAGE, _END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


class Gemma3Processor(ImageProcessor):
    """See the module. ``pixel_values`` are [parts, 3, height, width], the whole first."""

    text = _BEGIN

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        stated = self.stated
        self._size = two_sizes(stated.get("size", _SIZE), "size")
        self._resample = int(stated.get("resample", BILINEAR))
        self._numbers = Numbers.of(stated, HALVES, HALVES)
        self._number = int(config.get("mm_tokens_per_image", _TOKENS))
        self._settings = {
            name: default if stated.get(name) is None else stated[name]
            for name, default in _DEFAULTS.items()
        }
        self._image = token_id(config, "image_token_id", "image_token_index")
        self._words = Words(path)
        self._lines = LineEnds(self._words)
        self._words.check(**{_BEGIN: self.placeholder_id, _IMAGE: self._image, _END: None})
        self._tokens = lru_cache(maxsize=64)(self._expanded)

    def find_placeholder(self) -> int:
        """The token that begins an image, as prompts have it."""
        return token_id(self.config, "boi_token_index", "boi_token_id")

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """The token that begins an image, and that of a vector."""
        return (self.placeholder_id, self._image)

    def options(self) -> Sequence[str]:
        return (SPLITS, LEAST, MOST, RATIO)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: an option is of another type, or allows more parts than the model's
        settings."""
        chosen = {name: options.get(name, value) for name, value in self._settings.items()}
        self._check(chosen)
        parts = [pixels, *(crops(pixels, chosen) if chosen[SPLITS] else ())]
        x = np.stack([self._numbers(resized(part, *self._size, self._resample)) for part in parts])
        ids, runs = self._tokens(len(parts) - 1)
        return ProcessedMedia({PIXEL_VALUES: packed(x)}, len(ids), ids, runs)

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Each item on lines of its own, its vectors' tokens as spans that are seen whole."""
        # An image in parts begins with words.
        plain = [item.token_ids[:1] == (self.placeholder_id,) for item in media]
        lines = self._lines.around(token_ids, (self.placeholder_id,), [2 * own for own in plain])
        placed = expanded(lines, media, self.placeholder_id)
        spans = [
            (offset + first, offset + first + number)
            for item, offset in zip(media, placed.offsets, strict=True)
            for first, number in item.runs
        ]
        return placed._replace(whole_spans=spans)

    def largest_size(self) -> tuple[int, int]:
        most = max(2, int(self._settings[MOST]))
        return self._settings[LEAST], self._settings[LEAST] * most

    def sizeless(self, num_vectors: int) -> ProcessedMedia:
        """An image in one part, which a square is."""
        return self.one(np.zeros((1, 1, 3), np.uint8), {SPLITS: False})

    def blank(self, height: int, width: int) -> ProcessedMedia:
        """In as many parts as options may ask for."""
        return self.one(np.zeros((height, width, 3), np.uint8), {SPLITS: True})

    def _expanded(self, crops: int) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Tokens of an image with so many parts beside it, and the runs that take vectors. The line ends
        in front of the first and behind the last are not among them."""
        whole = f"{_BEGIN}{_IMAGE}{_END}"
        text = whole
        if crops:
            lines = f"\n\n{whole}\n\n"
            text = f"Here is the original image \n\n{whole}\n\n"
            text += " and here are some crops to help you see better "
            text += " ".join([lines] * crops).removesuffix("\n\n")
        return widened(self._words.ids(text), self._image, self._number)

    def _check(self, chosen: Mapping[str, Any]) -> None:
        ratio = chosen[RATIO]
        rules = (
            (SPLITS, type(chosen[SPLITS]) is bool, "true or false"),
            (LEAST, type(chosen[LEAST]) is int and chosen[LEAST] > 0, "a number of pixels"),
            (MOST, type(chosen[MOST]) is int and 2 <= chosen[MOST] <= max(2, self._settings[MOST]),
             f"a number of parts from 2 to {max(2, self._settings[MOST])}"),
            (RATIO, isinstance(ratio, int | float) and not isinstance(ratio, bool) and ratio >= 1,
             "a number of at least 1"),
        )  # fmt: skip
        for name, good, accepted in rules:
            if not good:
                raise RequestError(
                    f"mm_processor_kwargs.{name} = {chosen[name]!r}: must be {accepted}",
                    param="mm_processor_kwargs",
                )


def crops(pixels: Pixels, chosen: Mapping[str, Any]) -> list[Pixels]:
    """Parts of an image along its longer side, about square; none of one that is nearly square, or whose
    parts would be too small."""
    height, width = pixels.shape[:2]
    long, short = max(height, width), min(height, width)
    if long / short < chosen[RATIO]:
        return []
    number = min(long // chosen[LEAST], math.floor(long / short + 0.5))
    number = min(chosen[MOST], max(2, number))
    size = math.ceil(long / number)
    if min(size, short) < chosen[LEAST]:
        return []
    begins = range(0, size * number, size)
    if width >= height:
        return [pixels[:, begin : begin + size] for begin in begins]
    return [pixels[begin : begin + size] for begin in begins]
