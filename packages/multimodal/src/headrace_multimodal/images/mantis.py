"""Mantis: LLaVA's images, each within a text that says its number.

Jiang et al. 2024, arXiv:2405.01483.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.clip import LlavaProcessor
from headrace_multimodal.images.words import Words


class MantisProcessor(LlavaProcessor):
    """Prompts have ``<image>``, a token, for an image."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._words = Words(path)
        self._words.check(**{self.text: self.placeholder_id})

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`; texts around images become tokens together
        with what stands before and behind them."""
        if media:
            around = [(f"(image {n}: <Image>", "</Image>)") for n in range(1, len(media) + 1)]
            token_ids = self._words.with_text_around(
                token_ids, self.text, around, self.placeholder_id
            )
        return super().place(token_ids, media)
