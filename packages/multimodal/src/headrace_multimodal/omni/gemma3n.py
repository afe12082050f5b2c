"""Gemma 3n's media processor: images and recordings, each on lines of its own in a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.audio.features import INPUT_FEATURES
from headrace_multimodal.audio.gemma3n import Gemma3nRecordings
from headrace_multimodal.images.gemma3n import Gemma3nImages
from headrace_multimodal.images.processor import PIXEL_VALUES
from headrace_multimodal.images.words import LineEnds, Words
from headrace_multimodal.omni.by_modality import ByModality, Part


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
