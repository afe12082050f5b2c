"""Pixtral's images: of their own size up to a limit, with a token behind every row.

Agrawal et al. 2024, arXiv:2410.07073.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import (
    PIXEL_VALUES,
    ImageProcessor,
    packed,
    part,
)
from headrace_multimodal.images.settings import processor_settings
from headrace_multimodal.images.steps import BICUBIC, Numbers, resized, two_sizes
from headrace_multimodal.images.vocabulary import special_token_id

_EDGE = 1024
_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"


class Shrunk:
    """Shrink to fit into a box, then widen to whole units.

    Args:
        stated: the image processor's settings.
        unit: (height, width) of what becomes a token.
    """

    def __init__(self, stated: Mapping[str, Any], unit: tuple[int, int]) -> None:
        self.unit = unit
        self._numbers = Numbers.of(stated)
        self._resample = int(stated.get("resample", BICUBIC))
        for key, wanted in (("do_resize", True), ("do_center_crop", False)):
            if stated.get(key) not in (None, wanted):
                raise UnsupportedModel(
                    f"image processor: {key} = {stated[key]!r}: must be {str(wanted).lower()}"
                )
        size = stated.get("size", {"longest_edge": _EDGE})
        edge = size.get("longest_edge") if isinstance(size, Mapping) else size
        self.box = two_sizes(size if edge is None else edge, "size")

    def target(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of what it makes of an image of some size."""
        ratio = max(height / self.box[0], width / self.box[1])
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        # A very long image is shrunk to no width at all, of which the library makes nothing either.
        rows, columns = (
            (max(1, side) - 1) // unit + 1
            for side, unit in zip((height, width), self.unit, strict=True)
        )
        return rows * self.unit[0], columns * self.unit[1]

    def largest(self) -> tuple[int, int]:
        """The size of an image that fills the box."""
        return self.target(*self.box)

    def __call__(self, pixels: Pixels) -> Any:
        """[height, width, 3] -> [3, *target]."""
        height, width = self.target(*pixels.shape[:2])
        return self._numbers(resized(pixels, height, width, self._resample))


class PixtralProcessor(ImageProcessor):
    """A placeholder for each square of patches that becomes a vector; a token behind each row, another behind
    the last one."""

    text = "[IMG]"
    merge = 1
    """Side of a square in patches, if the config does not say it."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        unit = model_unit(config, self.merge)
        said = processor_settings(path)
        stated = said.get("patch_size", unit), said.get("spatial_merge_size", 1)
        if "patch_size" in said and _product(stated) != unit:
            raise UnsupportedModel(
                f"processor_config.json: patch_size = {stated[0]!r}, spatial_merge_size = {stated[1]!r}: "
                f"the model makes a vector of {unit} pixels by {unit}"
            )
        edge = part(config, "vision_config").get("image_size", _EDGE)
        # Without a file of settings (Mistral's own processor needs none) it is the tower's size.
        self._shape = Shrunk(self.stated or {"size": {"longest_edge": edge}}, (unit, unit))
        self._break = special_token_id(path, str(said.get("image_break_token", _BREAK)))
        self._end = special_token_id(path, str(said.get("image_end_token", _END)))

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        x = self._shape(pixels)
        unit = self._shape.unit
        rows, columns = x.shape[1] // unit[0], x.shape[2] // unit[1]
        tokens, runs = in_rows(rows, columns, (self.placeholder_id, self._break, self._end))
        return ProcessedMedia({PIXEL_VALUES: packed(x)}, len(tokens), tokens, runs)

    def largest_size(self) -> tuple[int, int]:
        return self._shape.box


class Mistral3Processor(PixtralProcessor):
    """Two by two patches become a vector."""

    merge = 2


class LightOnOCRProcessor(ImageProcessor):
    """A placeholder for each square of patches that becomes a vector, and nothing else."""

    text = "<|image_pad|>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._unit = model_unit(config, 2)
        self._shape = Shrunk(
            self.stated, two_sizes(self.stated.get("patch_size", 16), "patch_size")
        )

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        x = self._shape(pixels)
        count = (x.shape[1] // self._unit) * (x.shape[2] // self._unit)
        return ProcessedMedia({PIXEL_VALUES: packed(x)}, count)

    def sizeless(self, num_vectors: int) -> ProcessedMedia:
        """As many tokens as vectors: an image has no others."""
        return ProcessedMedia({}, num_vectors)

    def largest_size(self) -> tuple[int, int]:
        return self._shape.box


def in_rows(
    rows: int, columns: int, tokens: tuple[int, int, int]
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Tokens of an image, and the runs of those that stand for vectors
    (:class:`headrace_core.multimodal.ProcessedMedia`).

    Args:
        tokens: for a vector, behind a row, behind the last one.
    """
    mark, row_end, end = tokens
    found = (*((*[mark] * columns, row_end) * rows)[:-1], end)
    return found, tuple((index * (columns + 1), columns) for index in range(rows))


def model_unit(config: Mapping[str, Any], merge: int) -> int:
    """Pixels, in height and in width, that a model makes a vector of.

    Args:
        merge: ``spatial_merge_size`` of a config without.

    Raises:
        UnsupportedModel: a size is no number.
    """
    merge = config.get("spatial_merge_size", merge)
    patch = part(config, "vision_config").get("patch_size", 16)
    unit = _product((patch, merge))
    if unit is None:
        raise UnsupportedModel(
            f"config.json: patch_size = {patch!r}, spatial_merge_size = {merge!r}: must be sizes"
        )
    return unit


def _product(sizes: tuple[object, object]) -> int | None:
    first, second = sizes
    if type(first) is int and type(second) is int and first > 0 and second > 0:
        return first * second
    return None
