"""Bagel's images: of about their own size, in patches, between two tokens.

Deng et al. 2025, arXiv:2505.14683. The published pipeline resizes twice: first as for its other encoder, of
which nothing else is used where it understands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed, part
from headrace_multimodal.images.steps import HALVES, Numbers, resized
from headrace_multimodal.images.vocabulary import special_token_id
from headrace_multimodal.own_ways.molmo2 import in_patches
from headrace_multimodal.placeholders import expanded

_MOST_PIXELS = 14 * 14 * 9 * 1024
_LEAST_SIDE = 224
_IMAGE_SIZE, _PATCH = 980, 14
_MOST_ASPECT = 200
"""The published code has no bound; images that long become as large as the bounds of sides allow."""
_BEGIN, _END = "<|vision_start|>", "<|vision_end|>"


@dataclass(frozen=True, slots=True)
class Sides:
    """Bounds of an image's sides, all in pixels."""

    most: int
    """Of the longer side."""
    least: int
    """Of the shorter one."""
    step: int
    """Sides are multiples of it."""

    def of(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of an image within the bounds, as far as they do not contradict each other: the
        longer side's comes first."""
        scale = min(self.most / max(height, width), 1.0)
        size = self._scaled((height, width), max(scale, self.least / min(height, width)))
        if size[0] * size[1] > _MOST_PIXELS:
            size = self._scaled(size, _MOST_PIXELS / (size[0] * size[1]))
        if max(size) > self.most:
            size = self._scaled(size, self.most / max(size))
        return size

    def _scaled(self, size: tuple[int, int], scale: float) -> tuple[int, int]:
        height, width = (
            max(self.step, round(round(side * scale) / self.step) * self.step) for side in size
        )
        return height, width


_FIRST = Sides(1024, 512, 16)


class BagelProcessor(ImageProcessor):
    """``pixel_values`` are [patches, patch * patch * 3], row by row, ``image_grid`` [2] int64: rows and
    columns."""

    text = "<|image_pad|>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        vision = part(config, "vit_config")
        most, self._patch = (
            int(vision.get(key, default))
            for key, default in (("image_size", _IMAGE_SIZE), ("patch_size", _PATCH))
        )
        self._sides = Sides(most, min(_LEAST_SIDE, most), self._patch)
        self._numbers = Numbers.of({}, HALVES, HALVES)
        self._ends = special_token_id(path, _BEGIN), special_token_id(path, _END)

    def find_placeholder(self) -> int:
        return special_token_id(self.path, self.text)

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """The token of a vector, and those around an image."""
        return (self.placeholder_id, *self._ends)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: the image is too long for its width."""
        height, width = pixels.shape[:2]
        if max(height, width) > _MOST_ASPECT * min(height, width):
            raise RequestError(
                f"image of {width} x {height} pixels: one side may be {_MOST_ASPECT} times the other at most",
                param="multi_modal_data",
            )
        once = resized(pixels, *_FIRST.of(height, width))
        size = self._sides.of(*once.shape[:2])
        rows, columns = (side // self._patch for side in size)
        inputs = {
            PIXEL_VALUES: packed(in_patches(self._numbers(resized(once, *size)), self._patch)),
            "image_grid": packed(np.array((rows, columns), np.int64)),
        }
        return self._made(inputs, rows * columns)

    def sizeless(self, num_vectors: int) -> ProcessedMedia:
        """Vectors say all: an image is one step, whatever its size."""
        return self._made({}, num_vectors)

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Tokens around an image may be written; all of an image sees each other, with them."""
        placed = expanded(self._bare(token_ids), media, self.placeholder_id)
        spans = [
            (offset, offset + item.num_tokens)
            for offset, item in zip(placed.offsets, media, strict=True)
        ]
        return placed._replace(whole_spans=spans)

    def largest_size(self) -> tuple[int, int]:
        return self._sides.most, self._sides.most

    def _made(self, inputs: Mapping[str, Any], number: int) -> ProcessedMedia:
        begin, end = self._ends
        ids = (begin, *[self.placeholder_id] * number, end)
        return ProcessedMedia(inputs, len(ids), ids, ((1, number),))

    def _bare(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Placeholders without the tokens around them."""
        begin, end = self._ends
        marked = [None, *token_ids, None]
        return [
            token
            for before, token, after in zip(marked, token_ids, marked[2:], strict=False)
            if not (token == begin and after == self.placeholder_id)
            if not (token == end and before == self.placeholder_id)
        ]
