"""Videos that are objects of Python: arrays, tensors, lists of Pillow's images, with or without metadata."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace_core.errors import RequestError
from headrace_multimodal.images.pixels import ImageLimits, pixels_of
from headrace_multimodal.video.limits import VideoLimits, check_request

METADATA = ("fps", "duration", "total_num_frames", "frames_indices", "width", "height")
"""What is known of a video beside its frames, as transformers' ``VideoMetadata`` names it."""
_MORE = ("video_backend", "do_sample_frames")
"""Fields of vLLM's and transformers' metadata that change nothing here."""


class Clip(NamedTuple):
    """A video's frames, and what is known of where they come from."""

    frames: npt.NDArray[np.uint8]
    """[frames, height, width, 3], RGB."""
    metadata: Mapping[str, Any]
    """Some of :data:`METADATA`; {}: nothing is known."""


def clips_of(given: object, where: str, *, limits: VideoLimits | None = None) -> list[Clip]:
    """One video or several.

    Args:
        given: a video: an array or tensor of uint8 [frames, height, width, 3] or [frames, 3, height,
            width]; a list of images (PIL's, or arrays of three axes); or a tuple of either and metadata.
            Several: a list of these. A list is one video if its first element is an image.
        where: request field that errors name.

    Raises:
        RequestError: it is none of these, or over a limit.
    """
    limits = limits or VideoLimits()
    if isinstance(given, list) and not (given and _is_image(given[0])):
        return [_clip(one, where, limits) for one in given]
    return [_clip(given, where, limits)]


def _is_image(given: Any) -> bool:
    shape = getattr(given, "shape", None)
    return len(shape) == 3 if shape is not None else hasattr(given, "convert")


def _clip(given: Any, where: str, limits: VideoLimits) -> Clip:
    metadata: Mapping[str, Any] = {}
    if isinstance(given, tuple) and len(given) == 2:
        given, metadata = given[0], _checked(given[1], where)
    frames = _frames(given, where, limits)
    indices = metadata.get("frames_indices")
    if indices is not None and len(indices) != len(frames):
        raise RequestError(
            f"{where}: frames_indices has {len(indices)} numbers and the video {len(frames)} frames",
            param=where,
        )
    return Clip(frames, metadata)


def _frames(given: object, where: str, limits: VideoLimits) -> npt.NDArray[np.uint8]:
    if isinstance(given, list | tuple) and given:
        if len(given) > limits.frames:
            check_request(limits, (len(given), 1, 1), where)
        images = ImageLimits(pixels=min(limits.frame_pixels, limits.pixels // len(given)))
        frames = [pixels_of(image, where, limits=images) for image in given]
        if len({frame.shape for frame in frames}) == 1:
            return np.stack(frames)
        raise RequestError(f"{where}: frames of a video must be of one size", param=where)
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError):
        array = np.zeros(0)
    if array.ndim == 4 and array.shape[3] != 3 and array.shape[1] == 3:
        array = array.transpose(0, 2, 3, 1)
    if array.ndim != 4 or array.shape[3] != 3 or array.dtype != np.uint8 or not array.size:
        raise RequestError(
            f"{where}: {type(given).__name__} of shape {list(array.shape)} and dtype {array.dtype}: must be "
            "a list of PIL's images, an array of uint8 [frames, height, width, 3], or a tuple of either "
            "and metadata",
            param=where,
        )
    check_request(limits, array.shape, where)
    return np.ascontiguousarray(array)


def _checked(given: object, where: str) -> dict[str, Any]:
    """Metadata in plain numbers.

    Raises: RequestError: a field is unknown, or has another form; names it.
    """
    if not isinstance(given, Mapping):
        raise RequestError(f"{where}: metadata must be a mapping, not {given!r:.100}", param=where)
    unknown = sorted(set(map(str, given)) - {*METADATA, *_MORE})
    if unknown:
        raise RequestError(
            f"{where}: metadata has no field {unknown[0]!r}; fields are {', '.join(METADATA)}",
            param=where,
        )
    stated = {name: given[name] for name in METADATA if given.get(name) is not None}
    for name, value in stated.items():
        if name == "frames_indices":
            stated[name] = _indices(value, where)
        elif not _positive(value):
            raise RequestError(
                f"{where}: {name} = {value!r:.100}: must be a number above 0", param=where
            )
        else:
            stated[name] = float(value)
    return stated


def _positive(value: object) -> bool:
    return (
        isinstance(value, int | float | np.integer | np.floating)
        and not isinstance(value, bool)
        and bool(0 < value < 1e12)
    )


def _indices(given: Any, where: str) -> list[int]:
    numbers: Any = given.tolist() if hasattr(given, "tolist") else given
    good = isinstance(numbers, Sequence) and all(type(n) is int and n >= 0 for n in numbers)
    if not good or any(a > b for a, b in itertools.pairwise(numbers)):
        raise RequestError(
            f"{where}: frames_indices = {given!r:.100}: must be ascending numbers of frames",
            param=where,
        )
    return list(numbers)
