"""Emu3's images: of about their own size, a token for each place of 8 by 8 pixels and one behind each row.

Wang et al. 2024, arXiv:2409.18869.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import (
    PIXEL_VALUES,
    ImageProcessor,
    packed,
    part,
    token_id,
)
from headrace_multimodal.images.qwen_vl import MAX_ASPECT, smart_size
from headrace_multimodal.images.steps import BICUBIC, Numbers, resized
from headrace_multimodal.images.vocabulary import named_token, special_token_id
from headrace_multimodal.images.words import Words

_BOUNDS = (512 * 512, 1024 * 1024)
_PLACE = 8
"""Side of a place in pixels, as the library's processor counts them."""
_TOKENS = {
    "image_token": "<image>", "boi_token": "<|image start|>", "image_wrapper_token": "<|image token|>",
    "eof_token": "<|extra_201|>", "eoi_token": "<|image end|>", "bos_token": "<|extra_203|>",
}  # fmt: skip
"""Keys of ``tokenizer_config.json`` -> the tokens where it says none."""


class Emu3Processor(ImageProcessor):
    """``pixel_values`` are [3, height, width].

    An image's tokens begin with its rows and columns in figures. Only a prompt with images begins with the
    tokenizer's first token, as the library's processor writes it.
    """

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._bounds = _bounds(self.stated)
        levels = part(config, "vq_config").get("channel_multiplier", [1, 2, 2, 4])
        side = self.stated.get("spatial_factor", _PLACE)
        if side != _PLACE or 2 ** (len(levels) - 1) != _PLACE:
            raise UnsupportedModel(
                f"image processor: spatial_factor = {side!r}, vq_config.channel_multiplier = {levels!r}: a "
                f"token must stand for {_PLACE} by {_PLACE} pixels"
            )
        if not self.stated.get("do_resize", True):
            raise UnsupportedModel("image processor: do_resize = False: must be true")
        self._resample = int(self.stated.get("resample", BICUBIC))
        self._numbers = Numbers.of(self.stated)
        self._words = Words(path)
        names = {key: named_token(path, key, default) for key, default in _TOKENS.items()}
        self._names = names
        self._begin = special_token_id(path, names["bos_token"])
        self._words.check(**{name: None for key, name in names.items() if key != "image_token"})

    def find_placeholder(self) -> int:
        """The token of an image's place, by the vocabulary in the config."""
        return token_id(part(self.config, "vocabulary_map"), self.text)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: an image is 200 times as long as it is wide."""
        height, width = pixels.shape[:2]
        height, width = smart_size(height, width, _PLACE, *self._bounds)
        values = self._numbers(resized(pixels, height, width, self._resample))
        rows, columns = height // _PLACE, width // _PLACE
        name, number = self._names, rows * (columns + 1)
        first = self._words.ids(f"{name['boi_token']}{rows}*{columns}{name['image_wrapper_token']}")
        last = self._words.ids(name["eof_token"] + name["eoi_token"])
        ids = (*first, *[self.placeholder_id] * number, *last)
        inputs = {PIXEL_VALUES: packed(values)}
        return ProcessedMedia(inputs, len(ids), ids, ((len(first), number),))

    def largest_size(self) -> tuple[int, int]:
        """A column as high as the bounds let it be: each of its rows has a token more."""
        most = self._bounds[1] // _PLACE**2
        widths = [_PLACE * columns + 3 for columns in range(1, math.isqrt(most) + 1)]
        sizes = [(min(most // (w // _PLACE), MAX_ASPECT * w // _PLACE), w) for w in widths]
        rows, width = max(sizes, key=lambda size: size[0] * (size[1] // _PLACE + 1))
        return rows * _PLACE, width

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`."""
        return super().place([self._begin, *token_ids] if media else token_ids, media)


def _bounds(stated: Mapping[str, Any]) -> tuple[int, int]:
    """Least and most pixels of an image."""
    size = stated.get("size")
    size = size if isinstance(size, Mapping) else {}
    names = (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    found = [
        stated.get(old) or size.get(new) or size.get(old) or default
        for (old, new), default in zip(names, _BOUNDS, strict=True)
    ]
    if not all(type(x) is int for x in found) or not 0 < found[0] <= found[1] <= 1 << 28:
        raise UnsupportedModel(f"image processor: size = {found}: must be two numbers of pixels")
    return found[0], found[1]
