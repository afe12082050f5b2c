"""Base of the processors of models that take images and videos."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import MediaItem, MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.images.processor import ImageProcessor
from headrace_multimodal.images.settings import video_settings
from headrace_multimodal.placeholders import expanded_by_kind
from headrace_multimodal.video.sampling import NUM_FRAMES

Frames = npt.NDArray[np.uint8]
"""[frames, height, width, 3], RGB."""
PIXEL_VALUES_VIDEOS = "pixel_values_videos"
"""Model input: float32, in the family's own shape. It tells a video from an image."""
_ANY_LENGTH = 1 << 30


class VideoProcessor(ImageProcessor):
    """See :class:`headrace_core.multimodal.MediaProcessor`; families say how frames become numbers.

    The frames of an item are all processed: which of a file's are taken is decided where it is decoded.
    A checkpoint without a token for videos takes images only.
    """

    video_text: str = "<video>"
    """Placeholder where a template writes none."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self.video_stated = video_settings(path)
        self.video_placeholder_id = self.find_video_placeholder()

    def find_video_placeholder(self) -> int | None:
        """The token that stands for a video; None: there is none."""
        for key in ("video_token_id", "video_token_index"):
            value = self.config.get(key)
            if type(value) is int and value >= 0:
                return value
        return None

    def refuse_settings(self, **only: object) -> None:
        """
        Args:
            only: settings of videos, each with the one value that is served.

        Raises:
            UnsupportedModel: a setting has another value, and the checkpoint takes videos.
        """
        for key, value in only.items():
            found = self.video_stated.get(key)
            if self.video_placeholder_id is not None and found not in (None, value):
                raise UnsupportedModel(f"video processor: {key} = {found!r}: must be {value!r}")

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        number = self.video_placeholder_id
        return (*super().placeholder_ids, *(() if number is None else (number,)))

    def modalities(self) -> Sequence[Modality]:
        return ("image",) if self.video_placeholder_id is None else ("image", "video")

    def processed(self, item: MediaItem, options: Mapping[str, Any]) -> ProcessedMedia:
        if item.modality == "video":
            return self.one_video(item.data, item.metadata, options)
        return self.one(item.data, options)

    @abstractmethod
    def one_video(
        self, frames: Frames, metadata: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ProcessedMedia:
        """A video as the model wants it.

        Args:
            metadata: of :data:`headrace_multimodal.video.clip.METADATA`, what is known.
        """

    @abstractmethod
    def largest_video(self, num_frames: int, num_tokens: int) -> tuple[int, int, int]:
        """Frames, height and width of a video that takes as many tokens as any.

        Args:
            num_frames: at most.
            num_tokens: that a prompt holds.
        """

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        """An item of the stated ``height``, ``width`` and ``num_frames``, or as large as any that
        ``num_tokens`` allow."""
        if modality != "video":
            return super().largest(modality, sizes)
        most = sizes.get("num_tokens", _ANY_LENGTH)
        count, height, width = self.largest_video(sizes.get("num_frames", NUM_FRAMES), most)
        shape = count, sizes.get("height", height), sizes.get("width", width), 3
        return self.one_video(np.zeros(shape, np.uint8), {}, {})

    def placeholder(self, modality: Modality, index: int) -> str:
        return self.video_text if modality == "video" else self.text

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded_by_kind`."""
        image, video = self.placeholder_id, self.video_placeholder_id
        if video is None:
            return super().place(token_ids, media)
        kinds = [video if PIXEL_VALUES_VIDEOS in item.inputs else image for item in media]
        return expanded_by_kind(token_ids, list(zip(kinds, media, strict=True)), (image, video))
