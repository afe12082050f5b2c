"""Videos that are objects: how one is told from several, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headrace_core.errors import RequestError
from headrace_multimodal.video.clip import clips_of
from headrace_multimodal.video.limits import VideoLimits

FRAMES = np.random.default_rng(0).integers(0, 256, (3, 4, 6, 3), np.uint8)
PICTURES = [Image.fromarray(frame) for frame in FRAMES]


class Tensor:
    """As torch's: numpy reads it by its protocol."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return FRAMES if dtype is None else FRAMES.astype(dtype)


FORMS: dict[str, Callable[[], Any]] = {
    "array": lambda: FRAMES,
    "channels first": lambda: FRAMES.transpose(0, 3, 1, 2),
    "tensor": lambda: Tensor(),
    "pictures": lambda: PICTURES,
    "list of arrays": lambda: list(FRAMES),
    "with metadata": lambda: (FRAMES, {"fps": np.float32(2), "frames_indices": np.arange(3)}),
}


@pytest.mark.parametrize("form", FORMS)
def test_one_video_and_several(form: str) -> None:
    given = FORMS[form]()
    (one,) = clips_of(given, "video")
    np.testing.assert_array_equal(one.frames, FRAMES)
    several = clips_of([given, FRAMES], "video")
    assert [clip.frames.shape for clip in several] == [(3, 4, 6, 3)] * 2
    assert several[0].metadata == one.metadata


def test_metadata_is_plain() -> None:
    (one,) = clips_of(FORMS["with metadata"](), "video")
    assert one.metadata == {"fps": 2.0, "frames_indices": [0, 1, 2]}
    assert type(one.metadata["fps"]) is float


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (FRAMES[0], "shape \\[4, 6, 3\\]"),
        (FRAMES.astype(np.float32), "dtype float32"),
        ("clip.mp4", "str of shape"),
        ([PICTURES[0], PICTURES[0].resize((2, 2))], "one size"),
        ((FRAMES, {"frames": 2}), "no field 'frames'"),
        ((FRAMES, {"fps": 0}), "fps = 0"),
        ((FRAMES, {"fps": "2"}), "fps = '2'"),
        ((FRAMES, {"frames_indices": [0, 1]}), "2 numbers and the video 3 frames"),
        ((FRAMES, {"frames_indices": [2, 1, 0]}), "ascending"),
        ((FRAMES, 3), "metadata must be a mapping"),
        (np.zeros((9, 4, 6, 3), np.uint8), "9 frames: at most 8"),
        ([PICTURES[0]] * 9, "9 frames: at most 8"),
        (np.zeros((2, 100, 100, 3), np.uint8), "at most 10000 pixels"),
    ],
)  # fmt: skip
def test_refused(given: Any, named: str) -> None:
    with pytest.raises(RequestError, match=f"here: .*{named}"):
        clips_of(given, "here", limits=VideoLimits(frames=8, pixels=10000))
