"""Media for the scripts beside this one: given files, or a picture, a clip, a tone made here."""

from __future__ import annotations

import base64
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

RATE = 16_000
"""Samples of a second of the tones."""


def picture(file: Path | None = None, number: int = 0) -> Image.Image:
    """A file's image in RGB; None: a drawn one of 320 x 240, another one for each number."""
    if file is not None:
        with Image.open(file) as stored:
            return stored.convert("RGB")
    image = Image.new("RGB", (320, 240), f"hsl({number * 47 % 360}, 60%, 80%)")
    draw = ImageDraw.Draw(image)
    colour = f"hsl({(number * 47 + 180) % 360}, 80%, 40%)"
    draw.regular_polygon((160, 120, 90), number % 6 + 3, rotation=number * 10, fill=colour)
    return image


def data_url(image: Image.Image) -> str:
    """The image as a PNG in a URL."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def frames_of(file: Path, count: int) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
    """At most ``count`` frames of a video, evenly spaced, as uint8 [frames, height, width, 3], and its
    rate and which frames these are."""
    import av  # of headrace[video]

    with av.open(str(file)) as container:
        rate = container.streams.video[0].average_rate
        every = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    taken = np.linspace(0, len(every) - 1, min(count, len(every))).round().astype(int).tolist()
    known = {"total_num_frames": len(every), "frames_indices": taken}
    return np.stack([every[i] for i in taken]), {**known, "fps": float(rate or 24)}


def moving(image: Image.Image, count: int) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
    """A clip of ``count`` frames in which an image moves to the right, as :func:`frames_of` gives it."""
    pixels = np.asarray(image)
    frames = np.stack([np.roll(pixels, 4 * i, axis=1) for i in range(count)])
    return frames, {"fps": 8.0, "total_num_frames": count, "frames_indices": list(range(count))}


def recording(file: Path | None = None, number: int = 0) -> tuple[npt.NDArray[np.float32], int]:
    """A file's samples, its channels mixed, and their rate; None: a tone of 1.5 s, higher for each number."""
    if file is not None:
        import soundfile  # of headrace[audio]

        samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
        return samples.mean(axis=1), int(rate)
    times = np.arange(RATE * 3 // 2) / RATE
    tone = 0.3 * np.sin(2 * math.pi * 220 * (number + 1) * times)
    return tone.astype(np.float32), RATE
