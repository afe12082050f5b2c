"""Chameleon's images: of one size, each so many tokens between one of begin and one of end.

Chameleon Team 2024, arXiv:2405.09818.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.clip import OneSize
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import (
    PIXEL_VALUES,
    ImageProcessor,
    packed,
    part,
    token_id,
)
from headrace_multimodal.images.settings import processor_settings
from headrace_multimodal.images.steps import LANCZOS
from headrace_multimodal.images.vocabulary import named_token, special_token_id

_SIDE, _VECTORS = 512, 1024
_DEFAULTS: Mapping[str, Any] = {
    "resample": LANCZOS, "rescale_factor": 0.0078, "image_mean": [1.0] * 3, "image_std": [1.0] * 3,
}  # fmt: skip
"""Values that settings may leave out."""


class ChameleonProcessor(ImageProcessor):
    """``pixel_values`` are [3, side, side]. A prompt with images ends in the token that parts turns, as the
    library's processor ends it."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._shape = OneSize({**_DEFAULTS, **self.stated}, _SIDE)
        vq = part(config, "vq_config")
        side, levels = vq.get("resolution", _SIDE), vq.get("channel_multiplier", [1, 1, 2, 2, 4])
        if self._shape.size != (side, side):
            raise UnsupportedModel(
                f"image processor: size = {self._shape.size}: the tower takes images of {side!r}"
            )
        self._number = (side // 2 ** (len(levels) - 1)) ** 2
        stated = processor_settings(path).get("image_seq_length", _VECTORS)
        if stated != self._number:
            raise UnsupportedModel(
                f"processor_config.json: image_seq_length = {stated!r}: the tower makes {self._number} "
                "vectors"
            )
        names = (
            ("boi_token", "<racm3:break>"),
            ("eoi_token", "<eoss>"),
            ("sep_token", "<reserved08706>"),
        )
        self._begin, self._end, self._parting = (
            special_token_id(path, named_token(path, key, default)) for key, default in names
        )

    def find_placeholder(self) -> int:
        """The token of an image's place, by the vocabulary in the config."""
        return token_id(part(self.config, "vocabulary_map"), self.text)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        number = self._number
        ids = (self._begin, *[self.placeholder_id] * number, self._end)
        inputs = {PIXEL_VALUES: packed(self._shape(pixels))}
        return ProcessedMedia(inputs, number + 2, ids, ((1, number),))

    def sizeless(self, num_vectors: int) -> ProcessedMedia:
        """Any: all have as many vectors."""
        return self.blank(*self.largest_size())

    def largest_size(self) -> tuple[int, int]:
        return self._shape.size

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`."""
        if media and list(token_ids[-1:]) != [self._parting]:
            token_ids = [*token_ids, self._parting]
        return super().place(token_ids, media)
