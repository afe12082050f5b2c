"""Whisper's media processor: one clip, padded to the encoder's length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaItem, MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.audio.features import FeatureExtractor


class WhisperProcessor:
    """See :class:`headrace_core.multimodal.MediaProcessor`."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self.extract = FeatureExtractor.of(config, path)

    def modalities(self) -> Sequence[Modality]:
        return ("audio",)

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        """Every item becomes as many encoder states; the encoder sees the silence, too."""
        length = self.extract.num_frames // 2
        return [ProcessedMedia(self.extract(item, options).inputs(), length) for item in items]

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        """Every clip becomes equally many."""
        return self.process([self.extract.longest()], {})[0]

    def placeholder(self, modality: Modality, index: int) -> str:
        """None: the decoder's prompt holds no audio."""
        return ""

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """The decoder's prompt has no placeholders.

        Raises:
            RequestError: there is not exactly one clip.
        """
        if len(media) != 1:
            raise RequestError(
                f"{len(media)} audio items: the model listens to exactly one at a time",
                param="multi_modal_data",
            )
        return MediaPlacement(list(token_ids), [-1])
