"""Images of DeepSeek-VL2: an image in small, on grey, and in tiles, whose grid is that of the size in which
most of it is left.

Wu et al. 2024, arXiv:2412.10302, section 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images.internvl import wrong_option
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed, part
from headrace_multimodal.images.settings import processor_settings
from headrace_multimodal.images.steps import HALVES, Numbers, cut
from headrace_multimodal.images.vocabulary import special_token_id
from headrace_multimodal.tiles.deepseek_ocr import on_colour

CROPPING = "cropping"
"""Option: whether there may be more than one tile."""
GRID = "patches_grid"
"""Model input: [2] int64, columns and rows of tiles."""
_MOST_IN_TILES = 2
"""Images of a prompt, if there is more than one tile of each."""
_MOST_SIDES = 64
_SIDE, _PATCH, _RATIO = 384, 14, 2
"""Of a tile and of a patch, and patches of a vector in a row, as published."""
Size = tuple[int, int]
"""Width and height."""


class DeepseekVL2Processor(ImageProcessor):
    """``pixel_values`` are [1 + tiles, 3, side, side], the image in small first; see also :data:`GRID`.

    A token stands for each vector: rows of the image in small, each with an end; one behind them; rows of
    all tiles together, each with an end.
    """

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        stated = {**processor_settings(path), **self.stated}
        sizes = stated.get("candidate_resolutions", config.get("candidate_resolutions"))
        self._sizes = _sizes(sizes)
        self._side = self._sizes[0][0]
        tower = part(config, "vision_config").get("image_size", _SIDE)
        for key, found, only in (
            ("candidate_resolutions[0][0]", self._side, tower),
            ("downsample_ratio", stated.get("downsample_ratio", _RATIO), _RATIO),
            ("normalize", stated.get("normalize", True), True),
        ):
            if found != only:
                raise UnsupportedModel(f"image processor: {key} = {found!r}: must be {only!r}")
        self._short = -(-(self._side // _patch(stated)) // _RATIO)
        self._numbers = Numbers.of(stated, HALVES, HALVES)
        self._grey = tuple(int(mean * 255) for mean in self._numbers.mean or HALVES)

    def find_placeholder(self) -> int:
        """The token of a vector; configs do not say it."""
        return special_token_id(self.path, self.text)

    def options(self) -> Sequence[str]:
        return (CROPPING,)

    def options_for_numbers(
        self, numbers: Mapping[str, int], options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Options for images of a prompt that brings so many: of more than two, each is one tile."""
        if numbers.get("image", 0) <= _MOST_IN_TILES:
            return options
        return {CROPPING: False, **options}

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: the image is too narrow, or the option is not accepted."""
        cropping = options.get(CROPPING, True)
        if type(cropping) is not bool:
            raise wrong_option(CROPPING, cropping, "true or false")
        width, height = self._best(pixels) if cropping else (self._side, self._side)
        small = on_colour(pixels, self._side, self._side, self._grey)
        tiles = cut(on_colour(pixels, width, height, self._grey), self._side)
        grid = width // self._side, height // self._side
        inputs = {
            PIXEL_VALUES: packed(np.stack([self._numbers(tile) for tile in (small, *tiles)])),
            GRID: packed(np.array(grid, np.int64)),
        }
        return ProcessedMedia(inputs, self._num_vectors(grid))

    def sizeless(self, num_vectors: int) -> ProcessedMedia:
        """Any: no token stands between vectors."""
        return ProcessedMedia({}, num_vectors)

    def largest_size(self) -> tuple[int, int]:
        """The size of as many vectors as any."""
        grids = {(w // self._side, h // self._side): (h, w) for w, h in self._sizes}
        return grids[max(grids, key=self._num_vectors)]

    def _num_vectors(self, grid: Size) -> int:
        """Of an image in small and in so many columns and rows of tiles."""
        columns, rows = (self._short * number for number in grid)
        return self._short * (self._short + 1) + 1 + rows * (columns + 1)

    def _best(self, pixels: Pixels) -> Size:
        """The size in which most pixels of an image are left, of several the one that has the fewest others;
        the first, where none are left."""
        height, width = pixels.shape[:2]

        def key(size: Size) -> tuple[int, int]:
            scale = min(size[0] / width, size[1] / height)
            left = min(int(width * scale) * int(height * scale), width * height)
            return left, left - size[0] * size[1]

        return max(self._sizes, key=key)


def _patch(stated: Mapping[str, Any]) -> int:
    value = stated.get("patch_size", _PATCH)
    if type(value) is not int or value < 1:
        raise UnsupportedModel(
            f"image processor: patch_size = {value!r}: must be a number of pixels"
        )
    return value


def _sizes(stated: object) -> Sequence[Size]:
    """Raises: UnsupportedModel: they are no sizes, or not of whole tiles."""
    if isinstance(stated, list) and stated and all(_is_size(size) for size in stated):
        found = [(size[0], size[1]) for size in stated]
        side = found[0][0]
        if all(not x % side and x // side <= _MOST_SIDES for size in found for x in size):
            return found
    raise UnsupportedModel(
        f"image processor: candidate_resolutions = {stated!r:.200}: must be a list of widths and heights, "
        "the first of a tile, the others of whole ones"
    )


def _is_size(size: object) -> bool:
    return isinstance(size, list) and len(size) == 2 and all(type(x) is int and x > 0 for x in size)
