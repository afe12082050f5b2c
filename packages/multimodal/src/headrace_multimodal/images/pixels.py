"""Decode images: formats by list and by magic bytes, size checked before pixels are expanded."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaItem
from headrace_multimodal.hashing import content_hash

Pixels = npt.NDArray[np.uint8]
"""[height, width, 3], RGB."""

Colour = tuple[int, int, int]
"""Red, green and blue, 0 to 255 each."""
WHITE: Colour = (255, 255, 255)
"""What a page would show behind transparent pixels."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are tried; none that embeds other formats or text (PDF, SVG, PS)."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Budgets of one image. A client's options may only lower them."""

    encoded_bytes: int = 64 << 20
    pixels: int = 180_000_000


def decode_image(
    data: bytes, limits: ImageLimits, *, param: str = "messages", background: Colour = WHITE
) -> MediaItem:
    """Decode one image to RGB.

    Args:
        data: the encoded file.
        limits: checked before anything is expanded.
        param: request field that errors name.
        background: what transparent pixels are laid on.

    Returns:
        A ``MediaItem`` whose data is [height, width, 3] uint8. Of animations the first frame is taken.

    Raises:
        RequestError: over a limit, no known format, or broken.
    """
    if len(data) > limits.encoded_bytes:
        raise RequestError(
            f"image of {len(data)} bytes: at most {limits.encoded_bytes} are accepted", param=param
        )
    try:
        with warnings.catch_warnings():
            # The limit is ours, which is checked before anything is decoded.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check_size(image, limits, param)
                pixels = np.asarray(upright_rgb(image, background), dtype=np.uint8)
    except Image.DecompressionBombError as error:
        raise RequestError(
            f"image has too many pixels: at most {limits.pixels} are accepted", param=param
        ) from error
    except UnidentifiedImageError as error:
        raise RequestError(f"image is not one of {', '.join(FORMATS)}", param=param) from error
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


def pixels_of(
    given: object, param: str, *, limits: ImageLimits | None = None, background: Colour = WHITE
) -> Pixels:
    """An image that is an object of Python, as [height, width, 3] uint8.

    Args:
        given: PIL's image; or an array or tensor of uint8, [height, width, 3], [3, height, width] or
            [height, width].
        param: request field that errors name.
        background: what transparent pixels are laid on.

    Raises:
        RequestError: it is none of these, or over a limit.
    """
    if isinstance(given, Image.Image):
        _check_size(given, limits or ImageLimits(), param)
        try:
            return np.asarray(upright_rgb(given, background), dtype=np.uint8)
        except (OSError, SyntaxError, ValueError) as error:
            raise RequestError(f"{param}: the image cannot be decoded", param=param) from error
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError):
        array = np.zeros(0)
    if array.ndim == 2:
        array = np.repeat(array[..., None], 3, axis=2)
    if array.ndim == 3 and array.shape[2] != 3 and array.shape[0] == 3:
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8 or not array.size:
        raise RequestError(
            f"{param}: {type(given).__name__} of shape {list(array.shape)} and dtype {array.dtype}: must be "
            "PIL's image, or an array of uint8 [height, width, 3] or [3, height, width]",
            param=param,
        )
    if array.shape[0] * array.shape[1] > (limits or ImageLimits()).pixels:
        raise RequestError(f"{param}: too many pixels", param=param)
    return np.ascontiguousarray(array)


def upright_rgb(image: Image.Image, background: Colour = WHITE) -> Image.Image:
    """As RGB: turned as the camera says, deep greys scaled to 8 bits, what is transparent laid on the
    background."""
    image = ImageOps.exif_transpose(image)
    if image.mode in ("I;16", "I;16L", "I;16B", "I"):
        deep = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        return Image.fromarray((deep >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layer = image.convert("RGBA")
        page = Image.new("RGBA", layer.size, background)
        return Image.alpha_composite(page, layer).convert("RGB")
    return image.convert("RGB")
