"""Gemma 3n's media processor: images and recordings, each on lines of its own in a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.audio.features import INPUT_FEATURES, integer
from headrace_multimodal.audio.gemma3n import Gemma3nRecordings
from headrace_multimodal.images.clip import OneSize
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed
from headrace_multimodal.images.words import LineEnds, Words
from headrace_multimodal.omni.by_modality import ByModality, Part

_SIDE = 224
"""Of images, where settings say none."""
_TOKENS, _IMAGE, _BEGIN, _END = 256, 262_145, 255_999, 262_144


class Gemma3nImages(ImageProcessor):
    """Images of one size and of as many places. ``pixel_values`` are [3, height, width]; no line ends are
    among an image's tokens."""

    text = "<image_soft_token>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._shape = OneSize(self.stated, _SIDE, siglip=True)
        self._number = integer(config, "vision_soft_tokens_per_image", _TOKENS)
        begin, end = integer(config, "boi_token_id", _BEGIN), integer(config, "eoi_token_id", _END)
        self._tokens = (begin, *[self.placeholder_id] * self._number, end)

    def find_placeholder(self) -> int:
        """The token whose places the vectors take."""
        return integer(self.config, "image_token_id", _IMAGE)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        inputs = {PIXEL_VALUES: packed(self._shape(pixels))}
        return ProcessedMedia(inputs, len(self._tokens), self._tokens, ((1, self._number),))

    def largest_size(self) -> tuple[int, int]:
        return self._shape.size


class Gemma3nProcessor(ByModality):
    """A tower that the config leaves out takes nothing.

    Args:
        config: ``config.json``, whole.
        path: the checkpoint's folder.
    """

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        parts = []
        if "vision_config" in config:
            images = Gemma3nImages(config, path)
            parts.append(Part(images, (), {PIXEL_VALUES: images.placeholder_id}))
        if "audio_config" in config:
            heard = Gemma3nRecordings(config, path)
            parts.append(Part(heard, ("truncation",), {INPUT_FEATURES: heard.placeholder_id}))
        super().__init__(parts, {})
        self._marks = frozenset(token for part in parts for token in part.placeholders.values())
        self._lines = LineEnds(Words(path))

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Each item between line ends, which join those that are there."""
        return super().place(self._lines.around(token_ids, self._marks, ()), media)
