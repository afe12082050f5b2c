"""Images, audio and video on their way into a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Modality = Literal["image", "audio", "video"]
MODALITIES: tuple[Modality, ...] = ("image", "audio", "video")


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One decoded item."""

    modality: Modality
    data: Any
    """image: [height, width, 3] uint8; audio: [samples] float32 and its rate in ``metadata``;
    video: [frames, height, width, 3] uint8."""
    content_hash: str
    """256-bit hex over the decoded content, its shape and its options."""
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProcessedMedia:
    """A media item as the model wants it."""

    inputs: Mapping[str, Any]
    """Tensors for ``SupportsMultiModal.embed_media``."""
    num_tokens: int
    """Placeholder tokens that it takes in the prompt."""


class MediaProcessor(Protocol):
    """The object behind an entry point of ``headrace.multimodal_processors``, per model family."""

    def modalities(self) -> Sequence[Modality]: ...

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        """Raises RequestError naming the option or the item."""
        ...
