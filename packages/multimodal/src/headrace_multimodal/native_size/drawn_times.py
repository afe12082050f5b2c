"""Times drawn into the corners of a video's frames, in the font of a checkpoint.

Baidu 2025, ERNIE 4.5 technical report, section 2.1.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal.video.processor import Frames

_FONT = "Roboto-Regular.ttf"
"""File of the font, where no settings name one."""
_SHARE = 0.1
"""Height of letters of a frame's shorter side, and width of their edge of that height."""
_BLACK, _WHITE = (0, 0, 0), (255, 255, 255)


class DrawnTimes:
    """
    Args:
        file: the font's.

    Raises:
        UnsupportedModel: it is no font that FreeType reads.
    """

    def __init__(self, file: Path) -> None:
        try:
            self._font = file.read_bytes()
            self._of_size(10)
        except OSError as error:
            raise UnsupportedModel(f"{file}: must be a font, to draw times: {error}") from error

    def __call__(self, frames: Frames, times: Sequence[float]) -> Frames:
        """Copies of frames, each with its own time.

        Args:
            times: seconds.

        Raises:
            RequestError: a side has too few pixels for letters of one.
        """
        size = int(min(frames.shape[1:3]) * _SHARE)
        if size < 1:
            raise RequestError(
                f"a video of {frames.shape[2]} x {frames.shape[1]} pixels: sides must have at least "
                f"{round(1 / _SHARE)}, as times are drawn into the frames",
                param="multi_modal_data",
            )
        font = self._of_size(size)
        return np.stack([_drawn(*pair, font, size) for pair in zip(frames, times, strict=True)])

    def _of_size(self, size: int) -> ImageFont.FreeTypeFont:
        """A font of its own for each call: FreeType's are not for several threads."""
        return ImageFont.truetype(io.BytesIO(self._font), size)


def drawn_times(stated: Mapping[str, Any], path: Path) -> DrawnTimes | None:
    """What draws times as settings of videos say; None: they say that none are drawn.

    Args:
        path: the checkpoint's folder.

    Raises:
        UnsupportedModel: the font is no file of the folder, or no font.
    """
    if stated.get("draw_on_frames", True) is False:
        return None
    name = stated.get("font", _FONT)
    if not isinstance(name, str) or Path(name).name != name:
        raise UnsupportedModel(f"video processor: font = {name!r:.200}: must be a file's name")
    return DrawnTimes(path / name)


def has_font(stated: Mapping[str, Any], path: Path) -> bool:
    """Whether the folder has all that settings of videos need: no times are drawn, or a font is there."""
    if stated.get("draw_on_frames", True) is False:
        return True
    name = stated.get("font", _FONT)
    return not isinstance(name, str) or (path / name).is_file()


def as_text(seconds: float) -> str:
    """As it is drawn: ``time: 00:01:02.50``."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"time: {int(hours):02d}:{int(minutes):02d}:{seconds:05.02f}"


def _drawn(
    frame: np.ndarray[Any, Any], seconds: float, font: ImageFont.FreeTypeFont, size: int
) -> np.ndarray[Any, Any]:
    image = Image.fromarray(frame)
    ImageDraw.Draw(image).text(
        (0, 0), as_text(seconds), font=font, fill=_BLACK,
        stroke_width=int(size * _SHARE), stroke_fill=_WHITE,
    )  # fmt: skip
    return np.asarray(image)
