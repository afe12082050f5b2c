"""NVLM-D's images: InternVL's tiles, each behind a text that says which it is.

Dai et al. 2024, arXiv:2409.11402, section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.internvl_chat import WHOLE, InternVLChatProcessor
from headrace_multimodal.images.words import widened
from headrace_multimodal.placeholders import expanded

_BEGIN, _END = "<Image>", "</Image>"


class NVLMProcessor(InternVLChatProcessor):
    """``pixel_values`` are [tiles, 3, side, side], the whole last.

    Texts around an image are no tokens: they become tokens together with what stands before and behind
    them. An item is what lies between the first vector and the last.
    """

    text = "<|vision_pad|>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        if not self._has_whole:
            raise UnsupportedModel(
                f"config.json: {WHOLE} = False: must be true; its text says which tile is the whole"
            )

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`."""
        if media:
            around = [(_BEGIN + _tag(0, len(item.runs)), _END) for item in media]
            mark = self.text if self.placeholder_id in token_ids else self.written
            token_ids = self._words.with_text_around(token_ids, mark, around, self.placeholder_id)
        return expanded(token_ids, media, self.placeholder_id)

    def _check_words(self) -> None:
        """There are none: texts stand around an image."""

    def _tokens(self, count: int) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        tokens = [self.placeholder_id]
        for index in range(1, count):
            tokens += [*self._words.ids(_tag(index, count)), self.placeholder_id]
        return widened(tokens, self.placeholder_id, self._per_tile)


def _tag(index: int, count: int) -> str:
    """The text in front of one of so many tiles."""
    return f"<tile_{index + 1}>" if index < count - 1 else "<tile_global_thumbnail>"
