"""Images of any resolution in tiles, as LLaVA-NeXT and LLaVA-OneVision take them: the whole in one tile,
then the canvas of tiles that fits best.

Liu et al. 2024, "LLaVA-NeXT"; Li et al. 2024, arXiv:2408.03326.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.embeds_facts import IMAGE_SIZES
from headrace_multimodal.images.clip import OneSize
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed, part
from headrace_multimodal.images.steps import BICUBIC, CLIP_MEAN, CLIP_STD, cut, resized

PINPOINTS = "image_grid_pinpoints"
Size = tuple[int, int]
"""Height and width."""
Scaled = Callable[[int, int, int], int]


class AnyresProcessor(ImageProcessor):
    """LLaVA-NeXT's. ``pixel_values`` are [1 + tiles, 3, height, width].

    A token stands for each patch of the whole, each patch of the canvas that holds a part of the image, and
    each end of a row of these.
    """

    canvases: ClassVar[Sequence[Size]] = (
        (336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008),
    )  # fmt: skip
    """Where neither config has any."""
    tile_size: ClassVar[int] = 336
    """Where ``vision_config`` has none."""
    background: tuple[int, ...] = (0, 0, 0)
    """Colour of the canvas beside the image."""

    @staticmethod
    def scaled(length: int, new: int, old: int) -> int:
        """Of :func:`without_margins`."""
        return rounded(length, new, old)

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        vision = part(config, "vision_config")
        size, patch = vision.get("image_size", type(self).tile_size), vision.get("patch_size", 14)
        if not (type(size) is int and type(patch) is int and 0 < patch <= size <= 1 << 12):
            raise UnsupportedModel(
                f"config.json: vision_config.image_size = {size!r}, patch_size = {patch!r}: must be sizes"
            )
        self.tile, self.side = size, size // patch
        self._shape = self.tile_shape()
        if self._shape.size != (size, size):
            raise UnsupportedModel(
                f"image processor: makes tiles of {self._shape.size}, and config.json says "
                f"vision_config.image_size = {size}"
            )
        self.resample = int(self.stated.get("resample", BICUBIC))
        self.sizes = self._canvases()

    def tile_shape(self) -> OneSize:
        """What makes a tile of a piece of the canvas."""
        return OneSize(self.stated, self.tile)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        image = pixels.shape[0], pixels.shape[1]
        canvas = best_canvas(image, self.sizes)
        fitted = resized(pixels, *self.fitting(image, canvas), self.resample)
        tiles = [self.whole(pixels), *cut(on_canvas(fitted, canvas, self.background), self.tile)]
        inputs = {
            PIXEL_VALUES: packed(np.stack([self._shape(tile) for tile in tiles])),
            IMAGE_SIZES: packed(np.array(image, np.int64)),
        }
        return ProcessedMedia(inputs, self.num_tokens(image))

    def sizeless(self, num_vectors: int) -> ProcessedMedia:
        """As many tokens as vectors: an image has no others."""
        return ProcessedMedia({}, num_vectors)

    def num_tokens(self, image: Size) -> int:
        """Tokens of an image of that size."""
        canvas = best_canvas(image, self.sizes)
        per = self.side, self.tile
        grid = canvas[0] // per[1] * per[0], canvas[1] // per[1] * per[0]
        kept = without_margins(grid, image, self.scaled)
        rows, columns = self.fitted(kept)
        return self.side**2 + rows * (columns + 1)

    def whole(self, pixels: Pixels) -> Pixels:
        """All of an image in one tile."""
        return resized(pixels, self.tile, self.tile, self.resample)

    def fitting(self, image: Size, canvas: Size) -> Size:
        """The size of an image on its canvas."""
        return fitting(image, canvas)

    def fitted(self, grid: Size) -> Size:
        """Rows and columns of vectors, of those that the tower makes."""
        return grid

    def largest_size(self) -> tuple[int, int]:
        # What a canvas holds at most, and what narrower images of the same canvas do: as they are
        # reduced in steps, these may take more tokens.
        unit = self.tile / self.side
        found = [
            size
            for height, width in self.sizes
            for cut_off in (math.floor(unit * number) for number in range(self.side))
            for size in ((height - cut_off, width), (height, width - cut_off))
        ]
        return max(found, key=self.num_tokens)

    def _canvases(self) -> Sequence[Size]:
        stated, known = self.stated.get(PINPOINTS), self.config.get(PINPOINTS)
        if stated is not None and known is not None and _listed(stated) != _listed(known):
            raise UnsupportedModel(
                f"{PINPOINTS}: config.json and the image processor's settings differ"
            )
        said = known if stated is None else stated
        found = _listed(type(self).canvases if said is None else said)
        if not found or not all(
            len(size) == 2 and all(side > 0 and side % self.tile == 0 for side in size)
            for size in found
        ):
            raise UnsupportedModel(
                f"{PINPOINTS} = {said!r:.200}: must be heights and widths in multiples of "
                f"vision_config.image_size = {self.tile}"
            )
        return [(height, width) for height, width in found]


class OnevisionProcessor(AnyresProcessor):
    """LLaVA-OneVision's: many canvases; what takes too many tokens is interpolated behind the tower.

    Each image of a prompt is cut into tiles, however many there are.
    """

    canvases: ClassVar[Sequence[Size]] = tuple(
        itertools.product(range(384, 2305, 384), range(384, 2305, 384))
    )
    tile_size: ClassVar[int] = 384
    unbounded: ClassVar[str | None] = None
    """``vision_aspect_ratio`` that makes no image smaller, where there is one."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        stated = config.get("vision_aspect_ratio", "anyres_max_9")
        said = re.fullmatch(r"anyres_max_([1-9]\d{0,3})", str(stated))
        if said is None and stated != type(self).unbounded:
            raise UnsupportedModel(
                f"config.json: vision_aspect_ratio = {stated!r}: must be anyres_max_ and a number of tiles"
            )
        self._most = None if said is None else int(said[1])
        super().__init__(config, path)

    def tile_shape(self) -> OneSize:
        numbers = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
        return OneSize({**numbers, **self.stated}, self.tile, siglip=True)

    def fitted(self, grid: Size) -> Size:
        rows, columns = grid
        if self._most is None:
            return grid
        ratio = math.sqrt(rows * columns / (self._most * self.side**2))
        return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else grid


def best_canvas(image: Size, sizes: Sequence[Size]) -> Size:
    """The canvas that keeps most of the image's pixels; among equals, the one of which least is wasted."""
    height, width = image

    def worth(size: Size) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - size[0] * size[1]

    return max(sizes, key=worth)


def fitting(image: Size, canvas: Size) -> Size:
    """As large as fits into a canvas, rounded up."""
    height, width = image
    scales = canvas[0] / height, canvas[1] / width
    if scales[1] < scales[0]:
        return min(math.ceil(height * scales[1]), canvas[0]), canvas[1]
    return canvas[0], min(math.ceil(width * scales[0]), canvas[1])


def on_canvas(pixels: Pixels, canvas: Size, colour: Sequence[int]) -> Pixels:
    """[*canvas, 3]: the image in the middle, a colour around it."""
    height, width = pixels.shape[:2]
    top, left = (canvas[0] - height) // 2, (canvas[1] - width) // 2
    whole = np.empty((*canvas, 3), np.uint8)
    whole[:] = colour
    whole[top : top + height, left : left + width] = pixels
    return whole


def rounded(length: int, new: int, old: int) -> int:
    """About length * new / old: cut off behind a product that is rounded to seven places."""
    return int(round(length * (new / old), 7))


def exact(length: int, new: int, old: int) -> int:
    """As :func:`rounded`, cut off in whole numbers."""
    return length * new // old


def cut_off(length: int, new: int, old: int) -> int:
    """As :func:`rounded`, cut off behind a product of floats."""
    return int(length * (new / old))


def without_margins(grid: Size, image: Size, scaled: Scaled = rounded) -> Size:
    """Rows and columns of a canvas's vectors, less those that stand for the margins around the image.

    Args:
        scaled: says how many are no margin.
    """
    rows, columns = grid
    height, width = image
    if width / height > columns / rows:
        return rows - (rows - scaled(height, columns, width)) // 2 * 2, columns
    return rows, columns - (columns - scaled(width, rows, height)) // 2 * 2


def _listed(stated: object) -> list[tuple[int, ...]]:
    """Sizes of a config; [] if they are not lists of integers."""
    if not isinstance(stated, Sequence):
        return []
    if not all(
        isinstance(size, Sequence) and all(type(side) is int for side in size) for size in stated
    ):
        return []
    return [tuple(size) for size in stated]
