"""Videos of MiniCPM-V: frames one behind the other, each a picture in one piece without a number.

Yao et al. 2024, arXiv:2408.01800.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace_core.multimodal import MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.images.minicpmv import (
    SIZES,
    MiniCPMVProcessor,
    OlderMiniCPMVProcessor,
    check_shape,
)
from headrace_multimodal.images.processor import packed
from headrace_multimodal.images.vocabulary import special_token_id
from headrace_multimodal.images.words import widened
from headrace_multimodal.video.processor import PIXEL_VALUES_VIDEOS, Frames, VideoProcessor


def minicpmv_processor(config: Mapping[str, Any], path: Path) -> MiniCPMVProcessor:
    """The processor of a checkpoint, by its version; a config that names none is of 2.0 or 2.5.

    Args:
        config: ``config.json``, whole.
        path: its folder.
    """
    older = config.get("version") is None or str(config["version"]) in ("2.0", "2.5")
    return (OlderMiniCPMVProcessor if older else MiniCPMVVideos)(config, path)


class MiniCPMVVideos(VideoProcessor, MiniCPMVProcessor):
    """``pixel_values_videos`` are [patches, 3 * patch * patch], frame by frame; ``tgt_sizes`` [frames, 2]
    int64 their rows and columns of patches.

    Prompts have ``(<video>./</video>)`` for a video, which is not one token; the token that ends a slice,
    which no other prompt has, stands for it until it is laid out.
    """

    video_text = "(<video>./</video>)"
    written_video: ClassVar[str] = video_text

    def find_video_placeholder(self) -> int | None:
        return special_token_id(self.path, self._name("slice_end"))

    def placeholder(self, modality: Modality, index: int) -> str:
        """An image's token, which no text around it changes; a video's text."""
        if modality == "video":
            return self.video_text
        return MiniCPMVProcessor.placeholder(self, modality, index)

    def one_video(
        self, frames: Frames, metadata: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ProcessedMedia:
        """Raises: RequestError: its frames are too narrow."""
        check_shape(frames[0])
        pictures = [self._slices(frame, None)[0] for frame in frames]
        sizes = [(len(x) // self._patch, x.shape[1] // self._patch) for x in pictures]
        values = np.concatenate([self._patches(x) for x in pictures])
        one = self._words.ids("".join(self._name(key) for key in ("im_start", "unk", "im_end")))
        ids, runs = widened(one * len(frames), self.placeholder_id, self._number)
        inputs = {PIXEL_VALUES_VIDEOS: packed(values), SIZES: packed(np.array(sizes, np.int64))}
        return ProcessedMedia(inputs, len(ids), ids, runs)

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Each image behind its number."""
        return VideoProcessor.place(self, self.with_marks(token_ids, media), media)

    def with_marks(
        self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]
    ) -> Sequence[int]:
        """A prompt with a token for each image, behind its number, and for each video."""
        mark = self.video_placeholder_id
        films = [one for one in media if PIXEL_VALUES_VIDEOS in one.inputs]
        if films and mark is not None and mark not in token_ids:
            token_ids = self._words.replaced(token_ids, self.written_video, mark)
        return self._marked(token_ids) if len(films) < len(media) else token_ids

    def largest_video(self, num_frames: int, num_tokens: int) -> tuple[int, int, int]:
        return max(1, min(num_frames, num_tokens // (self._number + 2))), self._side, self._side
