"""Images and videos of GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR: patches as Qwen2-VL's, a budget of pixels
that counts an image as two frames, and frames that stand as images in front of their times.

GLM-V Team 2025, arXiv:2507.01006.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from headrace_core.errors import RequestError
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images.settings import processor_settings
from headrace_multimodal.images.steps import CLIP_MEAN, CLIP_STD
from headrace_multimodal.video.qwen_vl import FRAME_RATE, Qwen3VLVideos

_SIZE = "size"
_EDGES = ("shortest_edge", "longest_edge")
_START, _END = "<|begin_of_image|>", "<|end_of_image|>"
_WITH_TENTHS = "Glm46V"
"""Beginning of the name of the processor that writes times so."""


class Glm4vVideos(Qwen3VLVideos):
    """GLM-4.1V's and GLM-4.5V's: times are whole seconds."""

    text = f"{_START}<|image|>{_END}"
    video_text = "<|begin_of_video|><|video|><|end_of_video|>"
    image_bounds = (112 * 112, 28 * 28 * 15_000)
    bounds = (112 * 112, 28 * 28 * 2 * 30_000)
    colours = (CLIP_MEAN, CLIP_STD)
    tenths: ClassVar[bool] = False
    """Times are written with tenths of seconds, where the checkpoint does not name its processor."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self.embeds_width = 1
        settings = (processor_settings(path), self.stated, self.video_stated)
        name = next((s["processor_class"] for s in settings if s.get("processor_class")), None)
        self._tenths = self.tenths if name is None else str(name).startswith(_WITH_TENTHS)

    def options(self) -> Sequence[str]:
        return (_SIZE,)

    def image_limits(self, options: Mapping[str, Any]) -> tuple[int, int]:
        return _limits(options, self._least, self._most)

    def video_limits(self, options: Mapping[str, Any]) -> tuple[int, int]:
        return _limits(options, self._least_video, self._most_video)

    def image_size(self, size: tuple[int, ...], limits: tuple[int, int]) -> tuple[int, int]:
        height, width = size
        return self.frame_size(self._frames, height, width, *limits)

    def most_of_image(self) -> int:
        return self._most // self._frames

    def with_tokens(
        self,
        inputs: Mapping[str, Any],
        grid: tuple[int, int, int],
        count: int,
        metadata: Mapping[str, Any],
    ) -> ProcessedMedia:
        per = grid[1] * grid[2] // self._merge**2
        start, end = self._words.number(_START), self._words.number(_END)
        tokens: list[int] = []
        runs: list[tuple[int, int]] = []
        for time in self._times(count, metadata):
            tokens.append(start)
            runs.append((len(tokens), per))
            written = f"{time:.1f} seconds" if self._tenths else str(int(time))
            tokens += [*[self.placeholder_id] * per, end, *self._words.ids(written)]
        return ProcessedMedia(inputs, len(tokens), tuple(tokens), tuple(runs))

    def _times(self, count: int, metadata: Mapping[str, Any]) -> list[float]:
        """Seconds of the first of each two frames."""
        rate = metadata.get("fps") or FRAME_RATE
        indices = list(metadata.get("frames_indices") or range(count))
        return [index / rate for index in indices[:: self._frames]]


class Glm46VVideos(Glm4vVideos):
    """GLM-4.6V's."""

    tenths = True


class GlmOcrImages(Glm4vVideos):
    """GLM-OCR reads images only."""

    def find_video_placeholder(self) -> int | None:
        return None


def _limits(options: Mapping[str, Any], least: int, most: int) -> tuple[int, int]:
    """Least and most pixels by an option, within those of the checkpoint.

    Raises: RequestError: it is no object of two numbers.
    """
    if _SIZE not in options:
        return least, most
    size = options[_SIZE]
    edges = (
        [size[edge] for edge in _EDGES]
        if isinstance(size, Mapping) and set(size) == set(_EDGES)
        else []
    )
    if not edges or not all(type(edge) is int and edge > 0 for edge in edges):
        raise RequestError(
            f"mm_processor_kwargs.{_SIZE} = {size!r:.200}: must be an object of {' and '.join(_EDGES)}, "
            "numbers of pixels",
            param="mm_processor_kwargs",
        )
    most = min(edges[1], most)
    return min(edges[0], most), most
