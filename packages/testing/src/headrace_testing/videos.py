"""Small videos, made by PyAV."""

from __future__ import annotations

import tempfile
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def frames(count: int = 24, height: int = 48, width: int = 64) -> np.ndarray[Any, Any]:
    """[count, height, width, 3]: frame i is of one grey, 10 * i, so that it is known after a codec."""
    import numpy as np

    greys = (10 * np.arange(count)).astype(np.uint8)
    return np.ascontiguousarray(
        np.broadcast_to(greys[:, None, None, None], (count, height, width, 3))
    )


def written(
    pictures: np.ndarray[Any, Any], *, kind: str = "mp4", codec: str = "libx264", rate: int = 8
) -> bytes:
    """A file of these frames."""
    import av

    # Only a file with a name can be moved around, so that a player finds the index at its begin.
    options = {"movflags": "faststart"} if kind == "mp4" else {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "video"
        with av.open(str(file), "w", format=kind, options=options) as container:
            stream: Any = container.add_stream(codec, rate=Fraction(rate))
            stream.height, stream.width = pictures.shape[1:3]
            stream.pix_fmt = {"gif": "rgb8"}.get(codec, "yuv420p")
            for picture in pictures:
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        return file.read_bytes()
