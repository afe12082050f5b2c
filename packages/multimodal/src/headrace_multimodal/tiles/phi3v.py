"""Images of Phi-3-vision: as large as a number of tiles allows, on white, and the whole in one tile.

Abdin et al. 2024, arXiv:2404.14219, section 6; Dong et al. 2024, arXiv:2404.06512, section 3.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed, part
from headrace_multimodal.images.steps import BILINEAR, Float, Numbers, resized
from headrace_multimodal.images.vocabulary import special_token_id
from headrace_multimodal.tiles.pieces import PromptPieces, numbered
from headrace_multimodal.tiles.reduced import reduced

GRID, CROPS = "image_grid", "num_crops"
_USUAL_CROPS = 16
"""Options may ask for so many, though settings say fewer: the published examples of one image do."""
_MOST_CROPS = 1 << 8
_MERGE = 2
_MARK = re.compile(r"<\|image_(\d+)\|>|<\|image\|>")


class Phi3VProcessor(ImageProcessor):
    """See the module. ``pixel_values`` are [1 + tiles, 3, side, side], the whole first; ``image_grid`` [2]
    int64 rows and columns of tiles.

    Prompts have ``<|image_1|>`` and so on, by the images' numbers, which are text and no tokens; or
    ``<|image|>``, the token of a vector, for the next one. What stands between is made into tokens piece by
    piece, each behind what the tokenizer puts in front of a text.
    """

    text = "<|image|>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        tower = part(config, "img_processor")
        self._side, patch = tower.get("image_size", 336), tower.get("patch_size", 14)
        if not (type(self._side) is int and type(patch) is int and 0 < patch <= self._side <= 4096):
            raise UnsupportedModel(
                f"config.json: img_processor.image_size = {self._side!r}, patch_size = {patch!r}: must be "
                "sizes"
            )
        self._rows = self._side // patch // _MERGE
        self._crops = self.stated.get(CROPS, 1)
        if type(self._crops) is not int or not 0 < self._crops <= _MOST_CROPS:
            raise UnsupportedModel(
                f"image processor: {CROPS} = {self._crops!r}: must be a number from 1 to {_MOST_CROPS}"
            )
        self._most = max(self._crops, _USUAL_CROPS)
        self._numbers = Numbers.of(self.stated)
        self._pieces = PromptPieces(path)

    def find_placeholder(self) -> int:
        """The token of a vector; configs do not say it."""
        return special_token_id(self.path, self.text)

    def placeholder(self, modality: Modality, index: int) -> str:
        return f"<|image_{index + 1}|>"

    def options(self) -> Sequence[str]:
        return (CROPS,)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: the image is too narrow, or the option is no number of tiles."""
        most = options.get(CROPS, self._crops)
        if type(most) is not int or not 0 < most <= self._most:
            raise RequestError(
                f"mm_processor_kwargs.{CROPS} = {most!r}: must be a number of tiles from 1 to {self._most}",
                param="mm_processor_kwargs",
            )
        canvas = self._numbers(self._on_canvas(pixels, most))
        rows, columns = (size // self._side for size in canvas.shape[1:])
        tiles = np.concatenate([reduced(canvas, rows, columns)[None], self._cut(canvas)])
        inputs = {PIXEL_VALUES: packed(tiles), GRID: packed(np.array((rows, columns), np.int64))}
        count = (rows * columns + 1) * self._rows**2 + (rows + 1) * self._rows + 1
        return ProcessedMedia(inputs, count, (self.placeholder_id,) * count)

    def sizeless(self, num_vectors: int) -> ProcessedMedia:
        """As many tokens as vectors: an image has no others."""
        return ProcessedMedia({}, num_vectors, (self.placeholder_id,) * num_vectors)

    def largest_size(self) -> tuple[int, int]:
        """As many tiles as options may ask for, one below the other: most rows have ends."""
        return self._side * self._most, self._side

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        """In as many tiles as options may ask for, and ``num_tokens`` hold: a smaller image has no fewer."""
        height, width = self.largest_size()
        height, width = sizes.get("height", height), sizes.get("width", width)
        blank = np.zeros((height, width, 3), np.uint8)
        most = sizes.get("num_tokens", sys.maxsize)
        for crops in range(self._most, 1, -1):
            if (item := self.one(blank, {CROPS: crops})).num_tokens <= most:
                return item
        return self.one(blank, {CROPS: 1})

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Raises: RequestError: images and their marks are not of the same numbers."""
        if not media:
            return super().place(token_ids, media)
        texts, marks = self._pieces.around(token_ids, _MARK)
        order = numbered(marks, len(media))
        found, offsets = list(texts[0]), [-1] * len(media)
        for index, text in zip(order, texts[1:], strict=True):
            offsets[index] = len(found)
            found += [*media[index].token_ids, *text]
        return MediaPlacement(found, offsets)

    def _on_canvas(self, pixels: Pixels, most: int) -> Pixels:
        """As large as so many tiles hold it, in whole tiles: white above and below, or left and right of one
        that is higher than wide."""
        if pixels.shape[0] > pixels.shape[1]:
            return self._on_canvas(pixels.swapaxes(0, 1), most).swapaxes(0, 1)
        columns = columns_of(pixels.shape[1] / pixels.shape[0], most)
        width = columns * self._side
        height = int(width / (pixels.shape[1] / pixels.shape[0]))
        if not height:
            raise RequestError(
                f"image of {pixels.shape[1]} x {pixels.shape[0]} pixels: its longer side is more than "
                f"{width} times its shorter one",
                param="multi_modal_data",
            )
        rows = -(-height // self._side)
        canvas = np.full((rows * self._side, width, 3), 255, np.uint8)
        top = (len(canvas) - height) // 2
        canvas[top : top + height] = resized(np.ascontiguousarray(pixels), height, width, BILINEAR)
        return canvas

    def _cut(self, canvas: Float) -> Float:
        """[3, H, W] -> [tiles, 3, side, side], row by row."""
        side = self._side
        rows, columns = (size // side for size in canvas.shape[1:])
        blocks = canvas.reshape(3, rows, side, columns, side)
        return blocks.transpose(1, 3, 0, 2, 4).reshape(-1, 3, side, side)


def columns_of(ratio: float, most: int) -> int:
    """Tiles beside each other of an image so many times wider than high, with at most ``most`` in all."""
    columns = 1
    while (columns + 1) * math.ceil((columns + 1) / ratio) <= most:
        columns += 1
    return columns
