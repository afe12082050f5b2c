"""PaliGemma's images: of one size, in front of the prompt, all of which sees all of it.

Beyer et al. 2024, arXiv:2407.07726.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.clip import OneSize
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed, part
from headrace_multimodal.images.words import LineEnds, Words
from headrace_multimodal.placeholders import expanded

_BOS = 2


class PaliGemmaProcessor(ImageProcessor):
    """A prompt is images, the token that begins a text, the text, a line end."""

    needs_media = "the model's prompts begin with an image"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        vision, text = part(config, "vision_config"), part(config, "text_config")
        self._shape = OneSize(self.stated, vision.get("image_size", 224), siglip=True)
        patch = vision.get("patch_size", 14)
        if type(patch) is not int or patch < 1:
            raise UnsupportedModel(
                f"config.json: vision_config.patch_size = {patch!r}: must be a size"
            )
        height, width = self._shape.size
        self._number = (height // patch) * (width // patch)
        bos = text.get("bos_token_id", config.get("bos_token_id"))
        self._bos = bos if type(bos) is int else _BOS
        self._window = text.get("sliding_window") if text.get("model_type") == "gemma2" else None
        self._lines = LineEnds(Words(path))

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        return ProcessedMedia({PIXEL_VALUES: packed(self._shape(pixels))}, self._number)

    def sizeless(self, num_vectors: int) -> ProcessedMedia:
        """Any: all have as many vectors."""
        return self.blank(*self.largest_size())

    def largest_size(self) -> tuple[int, int]:
        return self._shape.size

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Images that the prompt has no place for stand in front of it.

        Raises:
            RequestError: it is longer than the window of the model's layers.
        """
        ids = list(token_ids)
        if self.placeholder_id not in ids:
            ids = [self.placeholder_id] * len(media) + ids
        placed = expanded(self._completed(ids), media, self.placeholder_id)
        number = len(placed.token_ids)
        if self._window is not None and number > self._window:
            raise RequestError(
                f"prompt of {number} tokens: must be at most {self._window} with images, as all of them see "
                "each other within the model's sliding_window",
                param="prompt",
            )
        return placed._replace(whole_spans=((0, number),))

    def _completed(self, ids: Sequence[int]) -> list[int]:
        """The token that begins a text behind the last image, and a line end at the end."""
        last = len(ids) - ids[::-1].index(self.placeholder_id)
        images = [token for token in ids[:last] if token != self._bos]
        text = [token for token in ids[last:] if token != self._bos]
        lines = 1
        while text and (number := self._lines.number(text[-1])):
            lines += number
            text.pop()
        return [*images, self._bos, *text, *self._lines.ids(lines)]


class ColPaliProcessor(PaliGemmaProcessor):
    """ColPali's: the template writes the whole prompt, and queries have no image (Faysse et al. 2024,
    arXiv:2407.01449)."""

    needs_media = ""

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`."""
        return expanded(token_ids, media, self.placeholder_id)
