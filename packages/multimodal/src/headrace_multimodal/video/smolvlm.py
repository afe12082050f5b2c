"""Videos of SmolVLM: each frame is one tile behind its time, and a sentence says what the video is.

Marafioti et al. 2025, arXiv:2504.05299.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.idefics3 import Idefics3Processor, bounded, longest_edge
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import packed
from headrace_multimodal.images.steps import HALVES, LANCZOS, Numbers, resized
from headrace_multimodal.images.words import widened
from headrace_multimodal.video.introduced import MARK, IntroducedVideo
from headrace_multimodal.video.number_words import MOST, in_words
from headrace_multimodal.video.processor import PIXEL_VALUES_VIDEOS, Frames, VideoProcessor

FRAME_RATE = 24.0
"""Frames a second of a video that says none."""
_FILM = "<video>"
"""Need be no token."""
_FRAME = "<fake_token_around_image><global-img><image><fake_token_around_image>"
_BEHIND = "\n\n"


class SmolVLMVideos(VideoProcessor, Idefics3Processor):
    """``pixel_values_videos`` are [frames, 3, side, side]."""

    video_text = _FILM

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        stated = self.video_stated
        self.refuse_settings(do_resize=True)
        sampling = stated.get("video_sampling")
        of_video = sampling.get("video_size") if isinstance(sampling, Mapping) else None
        sizes = stated if of_video is None else {"size": of_video}
        self._longest_video = longest_edge(sizes, "size", 4 * 364)
        self._resample_video = int(stated.get("resample", LANCZOS))
        self._video_numbers = Numbers.of(stated, HALVES, HALVES)

    def find_video_placeholder(self) -> int | None:
        return MARK

    def one_video(
        self, frames: Frames, metadata: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ProcessedMedia:
        """Raises: RequestError: there are more frames than the prompt has words for."""
        if len(frames) > MOST:
            raise RequestError(
                f"video of {len(frames)} frames: this model takes at most {MOST}",
                param="multi_modal_data.video",
            )
        rate = metadata.get("fps") or FRAME_RATE
        times = [i / rate for i in metadata.get("frames_indices") or range(len(frames))]
        seconds = int(metadata.get("duration") or times[-1])
        first, *others = [f"\nFrame from {int(t // 60):02d}:{int(t % 60):02d}:" for t in times]
        intro = (
            f"You are provided the following series of {in_words(len(frames))} frames from a "
            f"{timedelta(seconds=seconds)} [H:MM:SS] video.\n{first}"
        )
        text = _FRAME + "".join(time + _FRAME for time in others)
        ids, runs = widened(self._words.ids(text), self.placeholder_id, self._per_tile)
        values = np.stack([self._video_numbers(self._tile_of(frame)) for frame in frames])
        inputs = {PIXEL_VALUES_VIDEOS: packed(values)}
        return IntroducedVideo(inputs, len(ids), ids, runs, intro)

    def _tile_of(self, frame: Pixels) -> Pixels:
        size = bounded(frame.shape[:2], self._longest_video)
        fitted = resized(frame, *size, self._resample_video)
        return resized(fitted, self._tile, self._tile, self._resample_video)

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """What stands around a video becomes tokens together with the text that belongs to it."""
        videos = [one for one in media if isinstance(one, IntroducedVideo)]
        if videos:
            around = [(one.intro, _BEHIND) for one in videos]
            token_ids = self._words.with_text_around(token_ids, _FILM, around, MARK)
        return super().place(token_ids, media)

    def largest_video(self, num_frames: int, num_tokens: int) -> tuple[int, int, int]:
        most = min(num_frames, MOST, num_tokens // self._per_tile)
        return max(1, most), self._tile, self._tile
