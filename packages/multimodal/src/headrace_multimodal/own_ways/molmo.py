"""Molmo's images: a small picture of the whole, and crops that overlap, each of whose edges but the image's
own is left out of the prompt.

Deitke et al. 2024, arXiv:2409.17146, section 3. Sizes are computed in single precision, as the models were
trained.
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
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed
from headrace_multimodal.images.steps import CLIP_MEAN, CLIP_STD, Float, Numbers
from headrace_multimodal.images.vocabulary import named_token, special_token_id
from headrace_multimodal.own_ways.resampling import bilinear
from headrace_multimodal.placeholders import expanded

MOST = "max_crops"
_MOST_CROPS = 1 << 8
_BEHIND = -1.0
"""How much of the last crop's patches is image, as the published code has it: it puts the numbers of each
crop in front of its own, and this behind the last. Models were trained so."""
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

    @property
    def vectors(self) -> int:
        """Of a crop's side."""
        return (self.side + 1) // 2

    def pixels(self, crops: int) -> int:
        """Of a side of so many crops."""
        return (crops * self.window + self.margin) * self.patch

    def kept(self, index: int, crops: int) -> slice:
        """Vectors of a crop's side that stand in the prompt."""
        start = 0 if index == 0 else self.before // 2
        first, last = index == 0, index == crops - 1
        number = self.window + self.before * first + self.after * last
        return slice(start, start + (number + 1) // 2)


class MolmoProcessor(ImageProcessor):
    """See the module. ``pixel_values`` are [crops, patches, patch * patch * 3], the whole first;
    ``image_masks`` [crops, patches], how much of a patch is image; ``places`` [vectors] int64, those of the
    crops' vectors that are read; ``patch_token`` [1] int64.

    All images stand at the beginning of a prompt, behind the token that begins it; ``<|image|>`` may be
    written for each, and is taken out.
    """

    text = "<|image|>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._cutting = _cutting(self.stated)
        self._most = _number(self.stated, MOST, 12, _MOST_CROPS)
        normalises = {"do_normalize": self.stated.get("do_normalize", True)}
        self._numbers = Numbers.of({**normalises, "do_rescale": False}, CLIP_MEAN, CLIP_STD)
        self._patch, self._row, self._begin, self._end = (
            special_token_id(path, f"<im_{name}>") for name in ("patch", "col", "start", "end")
        )
        ends = named_token(
            path, "eos_token", "<|endoftext|>"
        )  # which also begins, if nothing else does
        self._first = special_token_id(path, named_token(path, "bos_token", ends))
        self._layout = lru_cache(maxsize=64)(self._laid)

    def find_placeholder(self) -> int:
        return special_token_id(self.path, self.text)

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """The token that may be written for an image, and that of a vector."""
        return (self.placeholder_id, self._patch)

    def options(self) -> Sequence[str]:
        return (MOST,)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: the image is too narrow, or the option is no number of crops that the model's
        settings allow."""
        most = options.get(MOST, self._most)
        if type(most) is not int or not 0 < most <= self._most:
            raise RequestError(
                f"mm_processor_kwargs.{MOST} = {most!r}: must be a number of crops from 1 to {self._most}",
                param="mm_processor_kwargs",
            )
        cutting = self._cutting
        margin = cutting.margin * cutting.patch
        height, width = pixels.shape[:2]
        grid = tiling(height - margin, width - margin, cutting.window * cutting.patch, most)
        ids, runs, places = self._layout(grid)
        values, masks = self._crops(pixels, grid)
        inputs = {
            PIXEL_VALUES: packed(values),
            "image_masks": packed(masks),
            "places": packed(places),
            "patch_token": packed(np.array([self._patch])),
        }
        return ProcessedMedia(inputs, len(ids), ids, runs)

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Raises: RequestError: the prompt has marks of images, and not one for each."""
        if not media:
            return expanded(token_ids, media, self.placeholder_id)
        marks = [token for token in token_ids if token == self.placeholder_id]
        others = [token for token in token_ids if token != self.placeholder_id]
        if others[:1] == [self._first]:
            others = others[1:]
        marks = marks or [self.placeholder_id] * len(media)
        return expanded([self._first, *marks, *others], media, self.placeholder_id)

    def largest_size(self) -> tuple[int, int]:
        """As many crops as are cut, one below the other: most rows have most ends."""
        return self._cutting.pixels(self._most), self._cutting.pixels(1)

    def _crops(self, pixels: Pixels, grid: tuple[int, int]) -> tuple[Float, Float]:
        """The numbers of the whole and of all crops, and how much of each patch is image."""
        cutting = self._cutting
        image = pixels.astype(np.float32) / np.float32(255)
        side, step = cutting.pixels(1), cutting.window * cutting.patch
        own, _ = self._padded(image, (side, side))
        large, mask = self._padded(image, (cutting.pixels(grid[0]), cutting.pixels(grid[1])))
        corners = list(itertools.product(*(range(0, n * step, step) for n in grid)))
        cut = [own, *(large[y : y + side, x : x + side] for y, x in corners)]
        masks = [mask[y : y + side, x : x + side, None] for y, x in corners]
        values = np.stack([in_patches(crop, cutting.patch) for crop in cut])
        parts = [in_patches(crop, cutting.patch).mean(axis=-1) for crop in masks]
        return values, np.stack([*parts, np.full_like(parts[0], _BEHIND)])

    def _padded(self, image: Float, size: tuple[int, int]) -> tuple[Float, Float]:
        """An image in the middle of a black one, as the tower takes it; and 1 where it is."""
        height, width = fitted(image.shape[:2], size)
        if not height or not width:
            raise RequestError(
                f"image of {image.shape[1]} x {image.shape[0]} pixels: is too narrow for this model",
                param="multi_modal_data",
            )
        whole, mask = np.zeros((*size, 3), np.float32), np.zeros(size, np.float32)
        top, left = (size[0] - height) // 2, (size[1] - width) // 2
        place = slice(top, top + height), slice(left, left + width)
        whole[place], mask[place] = bilinear(image, height, width).clip(0, 1), 1
        if self._numbers.mean is not None and self._numbers.std is not None:
            mean, std = (np.array(x, np.float32) for x in (self._numbers.mean, self._numbers.std))
            whole = (whole - mean) / std
        return whole, mask

    def _laid(
        self, grid: tuple[int, int]
    ) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], Ints]:
        """Tokens of an image in so many rows and columns of crops, the runs that take vectors, and these."""
        number = self._cutting.vectors
        large = kept_places(self._cutting, grid)
        whole = np.arange(number**2).reshape(number, number)
        ids: list[int] = []
        runs: list[tuple[int, int]] = []
        for rows in (whole, large + number**2):
            ids.append(self._begin)
            for row in rows:
                runs.append((len(ids), len(row)))
                ids += [*[self._patch] * len(row), self._row]
            ids.append(self._end)
        return tuple(ids), tuple(runs), np.concatenate([whole.ravel(), large.ravel() + number**2])


def kept_places(cutting: Cutting, grid: tuple[int, int]) -> Ints:
    """[rows, columns] of an image's vectors: each one's index among those of all crops."""
    number = cutting.vectors
    every = np.arange(grid[0] * grid[1] * number**2).reshape(*grid, number, number)
    return np.concatenate(
        [
            np.concatenate(
                [
                    every[i, j, cutting.kept(i, grid[0]), cutting.kept(j, grid[1])]
                    for j in range(grid[1])
                ],
                axis=1,
            )
            for i in range(grid[0])
        ]
    )


def in_patches(image: Float, patch: int) -> Float:
    """[H, W, C] -> [patches, patch * patch * C], row by row."""
    height, width, channels = image.shape
    cut = image.reshape(height // patch, patch, width // patch, patch, channels)
    return np.ascontiguousarray(cut.transpose(0, 2, 1, 3, 4).reshape(-1, patch * patch * channels))


def tiling(height: int, width: int, window: int, most: int) -> tuple[int, int]:
    """Rows and columns of windows that an image need grow least for, or shrink least; of equals the fewest.
    Of an image within the margins a side is negative, which the rule takes as it comes."""
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


def fitted(image: tuple[int, ...], size: tuple[int, int]) -> tuple[int, int]:
    """The largest height and width of an image's proportions within a size."""
    scale = min(np.float32(most) / np.float32(own) for own, most in zip(image, size, strict=True))
    return int(np.float32(image[0]) * scale), int(np.float32(image[1]) * scale)


def _cutting(stated: Mapping[str, Any]) -> Cutting:
    size = stated.get("base_image_input_size", (336, 336))
    margins = stated.get("overlap_margins", (4, 4))
    patch = _number(stated, "image_patch_size", 14)
    if not _are_sizes(size, 1) or size[0] != size[1] or size[0] % patch:
        raise UnsupportedModel(
            f"image processor: base_image_input_size = {size!r}: must be two equal multiples of {patch}"
        )
    side = size[0] // patch
    if not _are_sizes(margins, 0) or any(x % 2 for x in (*margins, side)) or sum(margins) >= side:
        raise UnsupportedModel(
            f"image processor: overlap_margins = {margins!r}: must be two even numbers, and of a crop's "
            f"{side} patches an even number must be left"
        )
    cutting = Cutting(side, margins[0], margins[1], patch)
    for key in ("image_token_length_w", "image_token_length_h"):
        if stated.get(key, cutting.vectors) != cutting.vectors:
            raise UnsupportedModel(
                f"image processor: {key} = {stated[key]!r}: {cutting.vectors} follows from the crops' size"
            )
    if not stated.get("image_padding_mask", True):
        raise UnsupportedModel("image processor: image_padding_mask = False: must be true")
    return cutting


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
