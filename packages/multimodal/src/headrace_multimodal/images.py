"""Decode images: formats by list and by magic bytes, size checked before pixels are expanded."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

import numpy as np
from PIL import Image, UnidentifiedImageError

from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaItem
from headrace_multimodal.hashing import content_hash

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are tried; none that embeds other formats or text (PDF, SVG, PS)."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Budgets of one image. A client's options may only lower them."""

    encoded_bytes: int = 64 << 20
    pixels: int = 180_000_000


def decode_image(data: bytes, limits: ImageLimits, *, param: str = "messages") -> MediaItem:
    """Decode one image to RGB.

    Args:
        data: the encoded file.
        limits: checked before anything is expanded.
        param: request field that errors name.

    Returns:
        A ``MediaItem`` whose data is [height, width, 3] uint8. Transparent pixels are laid on white;
        of animations the first frame is taken.

    Raises:
        RequestError: over a limit, no known format, or broken.
    """
    if len(data) > limits.encoded_bytes:
        raise RequestError(
            f"image of {len(data)} bytes: at most {limits.encoded_bytes} are accepted", param=param
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check_size(image, limits, param)
                pixels = np.asarray(_on_white(image), dtype=np.uint8)
    except (
        UnidentifiedImageError, Image.DecompressionBombError, Image.DecompressionBombWarning,
    ) as error:  # fmt: skip
        raise RequestError(
            f"image is not one of {', '.join(FORMATS)}, or too large", param=param
        ) from error
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError("image is damaged and cannot be decoded", param=param) from error
    height, width, _ = pixels.shape
    return MediaItem(
        "image", pixels, content_hash("image", pixels), {"width": width, "height": height}
    )


def _check_size(image: Image.Image, limits: ImageLimits, param: str) -> None:
    width, height = image.size
    if width * height > limits.pixels:
        raise RequestError(
            f"image of {width} x {height} pixels: at most {limits.pixels} are accepted", param=param
        )


def _on_white(image: Image.Image) -> Image.Image:
    """As RGB; what is transparent becomes white, as a page would show it."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")
