"""Budgets of one video."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_core.errors import RequestError


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """What a video may take, whoever sends it."""

    encoded_bytes: int = 256 << 20
    frame_pixels: int = 180_000_000
    seconds: float = 3600.0
    """Of a file, whatever is sampled of it."""
    frames: int = 768
    """That are taken."""
    pixels: int = 500_000_000
    """Of the frames that are taken, together."""

    def check(self, count: int, height: int, width: int) -> None:
        """
        Args:
            count: of the frames that are taken.

        Raises:
            ValueError: they are too many or too large; says which.
        """
        if height * width > self.frame_pixels:
            raise ValueError(
                f"video of {width} x {height} pixels: at most {self.frame_pixels} are accepted"
            )
        if count > self.frames:
            raise ValueError(f"video of {count} frames: at most {self.frames} are taken")
        if count * height * width > self.pixels:
            raise ValueError(
                f"video: {count} frames of {width} x {height} pixels: at most {self.pixels} pixels are "
                "accepted together"
            )


def check_request(limits: VideoLimits, shape: tuple[int, ...], where: str) -> None:
    """:meth:`VideoLimits.check` of frames [frames, height, width, ...] in a request.

    Raises:
        RequestError: naming ``where``.
    """
    try:
        limits.check(*shape[:3])
    except ValueError as error:
        raise RequestError(f"{where}: {error}", param=where) from None
