"""Videos of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: two frames make a patch, and a token stands for four of them.

Wang et al. 2024, arXiv:2409.12191; Bai et al. 2025, arXiv:2502.13923 (seconds); Bai et al. 2025,
arXiv:2511.21631 (times in the text).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem, ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import packed, part
from headrace_multimodal.images.qwen_vl import (
    QwenVLProcessor,
    near_square,
    pixels_option,
    smart_size,
)
from headrace_multimodal.images.steps import BICUBIC, CLIP_MEAN, CLIP_STD, HALVES, Numbers, resized
from headrace_multimodal.images.words import Words
from headrace_multimodal.video.processor import (
    PIXEL_VALUES_VIDEOS,
    Frames,
    VideoProcessor,
)
from headrace_multimodal.video.pruning import RATE, pruned, pruning_rate

GRID = "video_grid_thw"
"""Model input: [3] int64, a video's patches in time, height and width."""
SECONDS = "second_per_grid_ts"
"""Model input: [1] float32, seconds between two patches in time."""
FRAME_RATE = 24.0
"""Frames a second of a video that says none."""
_LEVELS = (8, 16, 24)
"""Layers of the tower whose vectors go to the decoder's first ones, where no config says them."""
_MOST = 1 << 40
"""Pixels that an option may say."""
_START, _PAD, _END = "<|vision_start|>", "<|video_pad|>", "<|vision_end|>"
Triple = tuple[float, ...]


class Qwen2VLVideos(VideoProcessor, QwenVLProcessor):
    """Each frame is of a size between bounds, whatever their number."""

    video_text = f"{_START}{_PAD}{_END}"
    bounds: ClassVar[tuple[int, int]] = (128 * 28 * 28, 768 * 28 * 28)
    """Least and most pixels where no settings say them."""
    colours: ClassVar[tuple[Triple, Triple]] = (CLIP_MEAN, CLIP_STD)
    """Mean and standard deviation, likewise."""
    prunes: ClassVar[bool] = True
    """The model keeps those tokens of a video that differ from the frame before, if that is asked."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        stated = self.video_stated
        self.refuse_settings(
            cap_pixels_per_frame=False,
            do_resize=True,
            patch_size=self._patch,
            temporal_patch_size=self._frames,
            merge_size=self._merge,
        )
        size = stated.get("size")
        size = size if isinstance(size, Mapping) else {}
        least, most = self.bounds
        self._least_video = int(stated.get("min_pixels") or size.get("shortest_edge") or least)
        self._most_video = int(stated.get("max_pixels") or size.get("longest_edge") or most)
        self._resample_video = int(stated.get("resample", BICUBIC))
        self._video_numbers = Numbers.of(stated, *self.colours)

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        """Raises: RequestError if the rate is wrong, also where no video comes; else as of images."""
        if self.prunes:
            pruning_rate(options)
        return super().process(items, options)

    def one_video(
        self, frames: Frames, metadata: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ProcessedMedia:
        """Bounds of a request narrow the checkpoint's own.

        Raises:
            RequestError: a side is 200 times as long as the other, or an option is no size.
        """
        rate = pruning_rate(options)
        count, rows, columns, _ = frames.shape
        least, most = self.video_limits(options)
        height, width = self.frame_size(count, rows, columns, least, most)
        x = np.stack([self._numbers_of(frame, height, width) for frame in frames])
        missing = -len(x) % self._frames
        if missing:
            x = np.concatenate([x, np.repeat(x[-1:], missing, axis=0)])
        grid = len(x) // self._frames, height // self._patch, width // self._patch
        inputs = {
            PIXEL_VALUES_VIDEOS: packed(self._cut(x, grid)),
            GRID: packed(np.array(grid, np.int64)),
            **self.further_inputs(count, metadata),
        }
        made = self.with_tokens(inputs, grid, count, metadata)
        if self.video_placeholder_id is None:
            return made
        return pruned(made, grid, self._merge, self.video_placeholder_id, rate)

    def options(self) -> Sequence[str]:
        return (*super().options(), *((RATE,) if self.prunes else ()))

    def video_limits(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """Least and most pixels of a frame, by a request's options."""
        own = self._most_video
        most = min(pixels_option(options, "max_pixels", own, _MOST), own)
        return min(pixels_option(options, "min_pixels", self._least_video, _MOST), most), most

    def frame_size(
        self, count: int, height: int, width: int, least: int, most: int
    ) -> tuple[int, int]:
        """Height and width of a video's frames."""
        return smart_size(height, width, self._patch * self._merge, least, most)

    def _numbers_of(self, frame: Pixels, height: int, width: int) -> np.ndarray[Any, Any]:
        return self._video_numbers(resized(frame, height, width, self._resample_video))

    def _cut(self, x: np.ndarray[Any, Any], grid: tuple[int, int, int]) -> np.ndarray[Any, Any]:
        """[frames, 3, height, width] -> [patches, 3 * 2 * patch * patch]."""
        (time, rows, columns), merge, patch = grid, self._merge, self._patch
        blocks = x.reshape(
            time, self._frames, 3, rows // merge, merge, patch, columns // merge, merge, patch
        )
        return blocks.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(math.prod(grid), -1)

    def further_inputs(self, count: int, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """What the model takes beside patches and grid."""
        return {}

    def with_tokens(
        self,
        inputs: Mapping[str, Any],
        grid: tuple[int, int, int],
        count: int,
        metadata: Mapping[str, Any],
    ) -> ProcessedMedia:
        """The item with its tokens: a placeholder for each vector."""
        number, placeholder = math.prod(grid) // self._merge**2, self.video_placeholder_id
        assert placeholder is not None
        return ProcessedMedia(inputs, number, (placeholder,) * number)

    def largest_video(self, num_frames: int, num_tokens: int) -> tuple[int, int, int]:
        groups = min(-(-num_frames // self._frames), num_tokens)
        factor = self._patch * self._merge
        most = min(self.most_of_frame(groups * self._frames) // factor**2, num_tokens // groups)
        height, width = near_square(most, factor)
        return min(num_frames, groups * self._frames), height, width

    def most_of_frame(self, count: int) -> int:
        """Most pixels of one of so many frames."""
        return self._most_video


class Qwen2_5VLVideos(Qwen2VLVideos):
    """The model is told how many seconds two frames take."""

    frame_rate: ClassVar[float] = FRAME_RATE
    """Frames a second of a video that says none."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._places_per_second = self.places_per_second()
        text = part(config, "text_config") or config
        self._context = number(text, "max_position_embeddings", math.inf)

    def places_per_second(self) -> float:
        """Places in the prompt between frames that stand a second apart."""
        return number(part(self.config, "vision_config"), "tokens_per_second", 4)

    def further_inputs(self, count: int, metadata: Mapping[str, Any]) -> dict[str, Any]:
        rate, total = metadata.get("fps"), metadata.get("total_num_frames")
        if rate is None or total is None:
            shown = self.frame_rate if rate is None else rate
        else:
            shown = count / total * rate
        self._check_length(count / shown)
        return {SECONDS: packed(np.array([self._frames / shown], np.float32))}

    def _check_length(self, seconds: float) -> None:
        """Raises: RequestError: the video's last frames stand behind the model's context."""
        if seconds * self._places_per_second > self._context:
            raise RequestError(
                f"a video of {seconds:.1f} s: at most {self._context / self._places_per_second:.1f} s are "
                f"accepted, as a second is {self._places_per_second:g} places of the model's context of "
                f"{self._context:g}; cut it, or state a larger fps in its metadata",
                param="multi_modal_data",
            )


def number(settings: Mapping[str, Any], key: str, default: float) -> float:
    """A setting; the default where it is left out.

    Raises: UnsupportedModel: it is no number above 0.
    """
    value = settings.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UnsupportedModel(f"config.json: {key} = {value!r:.100}: must be a number above 0")
    return float(value)


class Qwen3VLVideos(Qwen2VLVideos):
    """All frames share a budget of pixels, and each two stand behind their time, in the text."""

    bounds = (128 * 32 * 32, 768 * 32 * 32)
    colours = (HALVES, HALVES)

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._words = Words(path)
        levels = part(config, "vision_config").get("deepstack_visual_indexes", _LEVELS)
        self.embeds_width = 1 + len(levels)

    def frame_size(
        self, count: int, height: int, width: int, least: int, most: int
    ) -> tuple[int, int]:
        factor, given = self._patch * self._merge, (height, width)
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        count = max(count, self._frames)
        frames = round(count / self._frames) * self._frames
        return smart_size(height, width, factor, least, most, frames=(count, frames), given=given)

    def most_of_frame(self, count: int) -> int:
        return self._most_video // count

    def with_tokens(
        self,
        inputs: Mapping[str, Any],
        grid: tuple[int, int, int],
        count: int,
        metadata: Mapping[str, Any],
    ) -> ProcessedMedia:
        per = grid[1] * grid[2] // self._merge**2
        number = self.video_placeholder_id
        assert number is not None
        start, end = self._words.number(_START), self._words.number(_END)
        tokens: list[int] = []
        runs: list[tuple[int, int]] = []
        for time in self._times(count, metadata):
            tokens += [*self._words.ids(f"<{time:.1f} seconds>"), start]
            runs.append((len(tokens), per))
            tokens += [*[number] * per, end]
        return ProcessedMedia(inputs, len(tokens), tuple(tokens), tuple(runs))

    def _times(self, count: int, metadata: Mapping[str, Any]) -> list[float]:
        """Seconds of each two frames: the middle between the first and the last."""
        rate = metadata.get("fps") or FRAME_RATE
        indices = list(metadata.get("frames_indices") or range(count))
        indices += [indices[-1]] * (-count % self._frames)
        times = [index / rate for index in indices]
        step = self._frames
        return [(times[i] + times[i + step - 1]) / 2 for i in range(0, len(times), step)]
