"""Videos in files: frames that are sampled, limits, and damage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace_core.errors import RequestError
from headrace_multimodal.video.decode_worker import HEAD, BadVideo, decode
from headrace_multimodal.video.decoding import VideoDecoder
from headrace_multimodal.video.limits import VideoLimits
from headrace_multimodal.video.sampling import FrameSampling
from headrace_testing.videos import frames, written

KINDS = {
    "mp4": "libx264", "mov": "mpeg4", "webm": "libvpx-vp9", "matroska": "libx264", "avi": "mpeg4",
    "gif": "gif",
}  # fmt: skip
FOUR = FrameSampling(num_frames=4)
NEAR = 12
"""Greys of a codec lie so near to those that it was given."""


def greys(answer: bytearray, count: int) -> list[float]:
    (length,) = HEAD.unpack_from(answer, 1)
    pixels = np.frombuffer(answer, np.uint8, offset=1 + HEAD.size + length)
    means: list[float] = pixels.reshape(count, -1).mean(axis=1).tolist()
    return means


@pytest.mark.parametrize("kind", KINDS)
def test_frames_of_each_format_are_those_of_the_indices(kind: str) -> None:
    answer = decode(written(frames(), kind=kind, codec=KINDS[kind]), VideoLimits(), FOUR)
    for found, index in zip(greys(answer, 4), (0, 7, 15, 23), strict=True):
        assert abs(found - 10 * index) < NEAR, kind


@pytest.mark.parametrize(
    ("sampling", "total", "rate", "expected"),
    [
        (FrameSampling(4), 24, 8.0, [0, 7, 15, 23]),
        (FrameSampling(32), 3, 8.0, [0, 1, 2]),
        (FrameSampling(1), 9, 8.0, [0]),
        (FrameSampling(-1), 5, 8.0, [0, 1, 2, 3, 4]),
        (FrameSampling(fps=2), 24, 8.0, [0, 4, 9, 13, 18, 23]),
        (FrameSampling(fps=30), 3, 8.0, [0, 1, 2]),
        (FrameSampling(fps=0.1), 24, 8.0, [0]),
    ],
)
def test_sampling(sampling: FrameSampling, total: int, rate: float, expected: list[int]) -> None:
    assert sampling.indices(total, rate) == expected


def test_a_decoder_of_processes_gives_frames_and_metadata_and_survives_damage() -> None:
    decoder = VideoDecoder(VideoLimits(seconds=100), FOUR)
    try:
        whole = written(frames(), kind="mp4")
        for broken in (whole[: len(whole) // 2], b"no video", b"", whole[:40] + bytes(9000)):
            with pytest.raises(RequestError, match=r"messages\[0\]"):
                decoder(broken, "messages[0]")
        clip = decoder(whole, "messages[0]")
    finally:
        decoder.close()
    assert clip.frames.shape == (4, 48, 64, 3)
    assert clip.metadata == {
        "fps": 8.0, "duration": 3.0, "total_num_frames": 24, "frames_indices": [0, 7, 15, 23],
        "height": 48, "width": 64,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"seconds": 2.5}, "longer than 2.5 s"),
        ({"frame_pixels": 3000}, "64 x 48 pixels: at most 3000"),
        ({"frames": 3}, "4 frames: at most 3"),
        ({"pixels": 9000}, "at most 9000 pixels"),
    ],
)
def test_limits(limits: dict[str, Any], named: str) -> None:
    data = written(frames(), kind="webm", codec="libvpx-vp9")
    with pytest.raises(BadVideo, match=named):
        decode(data, VideoLimits(**limits), FOUR)


def test_too_many_bytes_are_refused_before_anything_is_read() -> None:
    decoder = VideoDecoder(VideoLimits(encoded_bytes=10))
    with pytest.raises(RequestError, match="video of 11 bytes: at most 10"):
        decoder(bytes(11), "messages[0]")


def test_sound_alone_is_no_video() -> None:
    import io

    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(BadVideo, match="no pictures"):
        decode(buffer.getvalue(), VideoLimits(), FOUR)
