"""MiniCPM-V's images: a small picture of the whole, and slices of about one area each.

Yao et al. 2024, arXiv:2408.01800, section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed, part
from headrace_multimodal.images.steps import HALVES, Float, Numbers, resized
from headrace_multimodal.images.vocabulary import special_token_id
from headrace_multimodal.images.words import Words, widened

SIZES, MOST = "tgt_sizes", "max_slice_nums"
_MOST_SLICES = 1 << 8
_LONGEST = 200
"""Times of its shorter side that an image's longer one may have."""
_NAMES: Mapping[str, str] = {
    "im_start": "<image>", "im_end": "</image>", "slice_start": "<slice>", "slice_end": "</slice>",
    "unk": "<unk>", "im_id_start": "<image_id>", "im_id_end": "</image_id>",
}  # fmt: skip
"""Keys of special tokens in the settings -> the tokens where settings leave them out."""
Grid = tuple[int, int]
"""Columns and rows of slices."""
Size = tuple[float, float]
"""Width and height."""


class MiniCPMVProcessor(ImageProcessor):
    """See the module. ``pixel_values`` are [patches, 3 * patch * patch], slice by slice, the whole first;
    ``tgt_sizes`` [slices, 2] int64 their rows and columns of patches.

    Prompts have ``(<image>./</image>)`` for an image, which is not one token, or the token of a vector. In
    front of each image is its number in the prompt.
    """

    written: ClassVar[str] = "(<image>./</image>)"
    names: ClassVar[Mapping[str, str]] = _NAMES
    """Keys of special tokens in the settings -> the tokens where settings leave them out."""
    counts: ClassVar[bool] = True
    """Images have numbers where settings do not say it."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        stated = self.stated
        self._side = _number(stated, "scale_resolution", 448)
        self._patch = _number(stated, "patch_size", 14)
        own = part(config, "vision_config").get("patch_size", config.get("patch_size", 14))
        if own != self._patch:
            raise UnsupportedModel(
                f"image processor: patch_size = {self._patch}: config.json says another for vision_config"
            )
        self._most = _number(stated, MOST, 9, _MOST_SLICES)
        if not stated.get("slice_mode", True):
            raise UnsupportedModel("image processor: slice_mode = False: must be true")
        self._number = _number(stated, "image_feature_size", 64)
        if config.get("query_num", 64) != self._number:
            raise UnsupportedModel(
                f"image processor: image_feature_size = {self._number}: config.json says query_num = "
                f"{config.get('query_num', 64)!r}"
            )
        self._counts = bool(stated.get("use_image_id", self.counts))
        means = {f"image_{x}": stated.get(f"norm_{x}", HALVES) for x in ("mean", "std")}
        self._numbers = Numbers.of(means)
        self._words = Words(path)
        self._words.check(**{self._name(key): None for key in self.names})
        self._tokens = lru_cache(maxsize=64)(self._expanded)

    def find_placeholder(self) -> int:
        """The token of a vector."""
        return special_token_id(self.path, self._name("unk"))

    def placeholder(self, modality: Modality, index: int) -> str:
        """The token, which no text around it changes."""
        return self._name("unk")

    def options(self) -> Sequence[str]:
        return (MOST,)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: the image is too narrow, or the option is no number, or more than the model's
        settings allow."""
        check_shape(pixels)
        most = options.get(MOST, self._most)
        if type(most) is not int or not 0 < most <= self._most:
            raise RequestError(
                f"mm_processor_kwargs.{MOST} = {most!r}: must be a number of slices from 1 to {self._most}",
                param="mm_processor_kwargs",
            )
        grid = grid_of((pixels.shape[1], pixels.shape[0]), self._side, most)
        slices = self._slices(pixels, grid)
        sizes = [(len(x) // self._patch, x.shape[1] // self._patch) for x in slices]
        values = np.concatenate([self._patches(x) for x in slices])
        ids, runs = self._tokens(grid)
        inputs = {PIXEL_VALUES: packed(values), SIZES: packed(np.array(sizes, np.int64))}
        return ProcessedMedia(inputs, len(ids), ids, runs)

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Each item behind its number."""
        return super().place(self._marked(token_ids) if media else token_ids, media)

    def _marked(self, token_ids: Sequence[int]) -> list[int]:
        """A prompt with a token for each image, and its number in front."""
        if self.placeholder_id not in token_ids:
            token_ids = self._words.replaced(token_ids, self.written, self.placeholder_id)
        return self._counted(token_ids)

    def largest_size(self) -> tuple[int, int]:
        """As many slices as are cut, one below the other."""
        return self._side * self._most, self._side

    def _slices(self, pixels: Pixels, grid: Grid | None) -> list[Pixels]:
        """The whole, then slices row by row."""
        height, width = pixels.shape[:2]
        own = _fitted((width, height), self._side, self._patch, grows=grid is None)
        found = [resized(pixels, own[1], own[0])]
        if grid is not None:
            columns, rows = grid
            each = (_multiple(width, columns) / columns, _multiple(height, rows) / rows)
            across, down = _fitted(each, self._side, self._patch, grows=True)
            large = resized(pixels, down * rows, across * columns)
            found += [
                large[row * down : (row + 1) * down, column * across : (column + 1) * across]
                for row in range(rows)
                for column in range(columns)
            ]
        return found

    def _patches(self, pixels: Pixels) -> Float:
        """[height, width, 3] uint8 -> [rows * columns, 3 * patch * patch] float32."""
        values, patch = self._numbers(pixels), self._patch
        _, height, width = values.shape
        cut = values.reshape(3, height // patch, patch, width // patch, patch)
        return cut.transpose(1, 3, 0, 2, 4).reshape(-1, 3 * patch**2)

    def _expanded(self, grid: Grid | None) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Tokens of an image in so many slices, and the runs that take vectors."""
        name = self._name
        columns, rows = grid or (0, 0)
        one = f"{name('slice_start')}{name('unk')}{name('slice_end')}"
        text = f"{name('im_start')}{name('unk')}{name('im_end')}" + "\n".join(
            [one * columns] * rows
        )
        return widened(self._words.ids(text), self.placeholder_id, self._number)

    def _counted(self, token_ids: Sequence[int]) -> list[int]:
        """A prompt with each image's number in front of its placeholder."""
        found: list[int] = []
        index = 0
        for token in token_ids:
            if token == self.placeholder_id and self._counts:
                numbered = f"{self._name('im_id_start')}{index}{self._name('im_id_end')}"
                found += self._words.ids(numbered)
                index += 1
            found.append(token)
        return found

    def _name(self, key: str) -> str:
        value = self.stated.get(key, self.names[key])
        if not isinstance(value, str) or not value:
            raise UnsupportedModel(f"image processor: {key} = {value!r}: must be a token's text")
        return value


class OlderMiniCPMVProcessor(MiniCPMVProcessor):
    """The same for 2.0 and 2.5: slices are marked as images, and all of them together as slices; images have
    no numbers."""

    names: ClassVar[Mapping[str, str]] = {
        key: text for key, text in _NAMES.items() if key not in ("im_id_start", "im_id_end")
    }
    counts: ClassVar[bool] = False

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        if self._counts:
            raise UnsupportedModel(
                "image processor: use_image_id = True: must be false, or config.json must say a version from "
                "2.6"
            )

    def _expanded(self, grid: Grid | None) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        name = self._name
        one = f"{name('im_start')}{name('unk')}{name('im_end')}"
        text = one
        if grid is not None:
            columns, rows = grid
            cut = "\n".join([one * columns] * rows)
            text += f"{name('slice_start')}{cut}{name('slice_end')}"
        return widened(self._words.ids(text), self.placeholder_id, self._number)


def check_shape(pixels: Pixels) -> None:
    """Raises: RequestError: an image is so narrow that a slice of about one area has very many patches."""
    height, width = pixels.shape[:2]
    if max(height, width) > _LONGEST * min(height, width):
        raise RequestError(
            f"image of {width} x {height} pixels: one side may be {_LONGEST} times the other at most",
            param="multi_modal_data",
        )


def grid_of(image: Size, side: int, most: int) -> Grid | None:
    """The grid for an image: about as many slices as it has the area of, one more or less, with the shape
    nearest to the image's; None: it is not sliced.

    Args:
        image: width and height.
        side: a slice has about the area of this square.
    """
    width, height = image
    shape = math.log(width / height)
    wished = min(math.ceil(width * height / (side * side)), most)
    if wished <= 1:
        return None
    grids = [
        (columns, number // columns)
        for number in (wished - 1, wished, wished + 1)
        if 1 < number <= most
        for columns in range(1, number + 1)
        if number % columns == 0
    ]
    return min(grids, key=lambda grid: abs(shape - math.log(grid[0] / grid[1])))


def _fitted(image: Size, side: int, patch: int, *, grows: bool) -> tuple[int, int]:
    """Width and height in whole patches, about as large as a square if the image is larger, or may grow."""
    width, height = image
    if grows or width * height > side * side:
        shape = width / height
        height = int(side / math.sqrt(shape))
        width = int(height * shape)
    return _multiple(width, patch), _multiple(height, patch)


def _multiple(length: float, unit: int) -> int:
    """The nearest multiple that is not 0."""
    return max(round(length / unit) * unit, unit)


def _number(stated: Mapping[str, Any], key: str, default: int, most: int = 1 << 14) -> int:
    value = stated.get(key, default)
    if type(value) is not int or not 0 < value <= most:
        raise UnsupportedModel(
            f"image processor: {key} = {value!r}: must be a number from 1 to {most}"
        )
    return value
