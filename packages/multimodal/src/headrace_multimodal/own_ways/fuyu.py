"""Fuyu's image: its patches row by row, in front of the token that begins a text.

Bavishi et al. 2023, "Fuyu-8B: A multimodal architecture for AI agents".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed
from headrace_multimodal.images.steps import BILINEAR, Numbers, resized, two_sizes
from headrace_multimodal.images.vocabulary import special_token_id
from headrace_multimodal.placeholders import expanded

_SIZE, _PATCH, _PADDING = {"height": 1080, "width": 1920}, 30, 1.0


class FuyuProcessor(ImageProcessor):
    """``pixel_values`` are [patches, patch * patch * 3]. A prompt is one image, the token that begins a text,
    the text, and the token that begins an answer."""

    text = "|SPEAKER|"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        stated = self.stated
        self._size = two_sizes(stated.get("size", _SIZE), "size")
        patch = two_sizes(stated.get("patch_size", _PATCH), "patch_size")
        self._patch = patch[0]
        if patch != (self._patch, self._patch) or config.get("patch_size", _PATCH) != self._patch:
            raise UnsupportedModel(
                f"image processor: patch_size = {patch}: config.json says {config.get('patch_size')!r}"
            )
        if any(side % self._patch for side in self._size):
            raise UnsupportedModel(
                f"image processor: size = {self._size}: must be so many patches of {self._patch}"
            )
        for key in ("do_resize", "do_pad"):
            if not stated.get(key, True):
                raise UnsupportedModel(f"image processor: {key} = False: must be true")
        if stated.get("padding_mode", "constant") != "constant":
            raise UnsupportedModel(
                f"image processor: padding_mode = {stated['padding_mode']!r}: must be constant"
            )
        self._padding = float(stated.get("padding_value", _PADDING))
        self._resample = int(stated.get("resample", BILINEAR))
        self._numbers = Numbers.of({**stated, **{key: _three(stated, key) for key in _MEANS}})
        self._row, self._begin, self._answer = (
            special_token_id(path, name) for name in ("|NEWLINE|", "<s>", "<0x04>")
        )

    def find_placeholder(self) -> int:
        return special_token_id(self.path, self.text)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: the image is too narrow."""
        height, width = self._fitted(pixels.shape[0], pixels.shape[1])
        patch = self._patch
        rows, columns = -(-height // patch), -(-width // patch)
        whole = np.full((rows * patch, columns * patch, 3), self._padding, np.float32)
        whole[:height, :width] = resized(pixels, height, width, self._resample)
        values = self._numbers(whole)  # type: ignore[arg-type] # the padding need be no byte
        cut = values.reshape(3, rows, patch, columns, patch).transpose(1, 3, 2, 4, 0)
        ids = ((self.placeholder_id,) * columns + (self._row,)) * rows
        runs = tuple((row * (columns + 1), columns) for row in range(rows))
        inputs = {PIXEL_VALUES: packed(cut.reshape(rows * columns, -1))}
        return ProcessedMedia(inputs, len(ids), ids, runs)

    def placeholder(self, modality: Modality, index: int) -> str:
        """The token of a patch, which :meth:`place` takes out."""
        return self.text

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Raises: RequestError: there is more than one image."""
        if not media:
            return expanded(token_ids, media, self.placeholder_id)
        if len(media) > 1:
            raise RequestError(
                f"the prompt comes with {len(media)} images: this model takes one",
                param="multi_modal_data",
            )
        text = [token for token in token_ids if token not in (self.placeholder_id, self._begin)]
        if text[-1:] != [self._answer]:
            text.append(self._answer)
        return expanded([self.placeholder_id, self._begin, *text], media, self.placeholder_id)

    def largest_size(self) -> tuple[int, int]:
        return self._size

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """An image that is too large has its own proportions within the largest size."""
        most_height, most_width = self._size
        if height <= most_height and width <= most_width:
            return height, width
        scale = min(most_height / height, most_width / width)
        own = int(height * scale), int(width * scale)
        if not all(own):
            raise RequestError(
                f"image of {width} x {height} pixels: is too narrow for this model",
                param="multi_modal_data",
            )
        return own


_MEANS = ("image_mean", "image_std")


def _three(stated: Mapping[str, Any], key: str) -> Any:
    """A number for each channel, where one may be stated for all."""
    value = stated.get(key, 0.5)
    return [value] * 3 if isinstance(value, int | float) else value
