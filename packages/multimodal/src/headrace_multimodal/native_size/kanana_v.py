"""Kanana-V's images: Qwen2-VL's, whose rows stand on lines of their own, and prompts that become tokens piece
by piece.

Kakao 2025, "Kanana-1.5-v-3b-instruct".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.embeds_facts import fact
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import part
from headrace_multimodal.images.qwen_vl import GRID, QwenVLProcessor
from headrace_multimodal.images.steps import BICUBIC, resized
from headrace_multimodal.images.words import Words

_ROLES = ("\nAI: ", "\nHuman: ")
"""Beginnings of turns, which are tokens of their own."""


class KananaVProcessor(QwenVLProcessor):
    """A line end, then rows of vectors with a line end between them. The token that stands for a vector is
    the one behind the end of a text, as no text has it."""

    text = "<image>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._words = Words(path)

    def find_placeholder(self) -> int:
        end = part(self.config, "text_config").get("eos_token_id")
        if type(end) is not int or end < 0:
            raise UnsupportedModel(
                f"config.json: text_config.eos_token_id = {end!r}: must be a token id, as the next one "
                "stands for images"
            )
        return end + 1

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: an image is 200 times as long as it is wide, or an option is no size."""
        height, width = pixels.shape[:2]
        self.image_size((height, width), self.image_limits(options))
        unit = self._patch * self._merge
        if min(height, width) < unit:
            scale = unit / min(height, width)
            height, width = (max(unit, int(side * scale)) for side in (height, width))
            pixels = resized(pixels, height, width, BICUBIC)
        made = super().one(pixels, options)
        height, width = self.image_size((height, width), self.image_limits(options))
        return self._in_rows(made, height // unit, width // unit)

    def embedded(
        self, modality: Modality, num_vectors: int, facts: Mapping[str, Any]
    ) -> ProcessedMedia:
        """An image of the stated grid; see :class:`headrace_core.multimodal.TakesEmbeds`."""
        made = super().embedded(modality, num_vectors, facts)
        _, rows, columns = fact(facts, GRID, 3)
        return self._in_rows(made, rows // self._merge, columns // self._merge)

    @cached_property
    def _line_end(self) -> tuple[int, ...]:
        return tuple(self._words.ids("\n"))

    def _in_rows(self, made: ProcessedMedia, rows: int, columns: int) -> ProcessedMedia:
        row = (*self._line_end, *[self.placeholder_id] * columns)
        first = len(self._line_end)
        runs = tuple((index * len(row) + first, columns) for index in range(rows))
        return replace(made, num_tokens=rows * len(row), token_ids=row * rows, runs=runs)

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`. Texts between images and beginnings of turns
        become tokens by themselves, unless the prompt's are not those that the tokenizer makes."""
        words = self._words
        whole = words.text(token_ids)
        if words.ids(whole) != list(token_ids):
            if media:
                token_ids = words.replaced(token_ids, self.text, self.placeholder_id)
            return super().place(token_ids, media)
        borders = "|".join(map(re.escape, (*_ROLES, *([self.text] if media else []))))
        found: list[int] = []
        for piece in re.split(f"({borders})", whole):
            is_image = bool(media) and piece == self.text
            found += [self.placeholder_id] if is_image else words.ids(piece)
        return super().place(found, media)
