"""Videos in files: frames that are sampled, limits, and damage."""

from __future__ import annotations

import io
import json
import random
import re
import struct
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

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


def test_frames_that_are_not_shown_are_not_counted() -> None:
    """VP8's may serve others alone (RFC 6386, section 9.1: the first byte's fifth bit)."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="webm") as file:
        stream = file.add_stream("libvpx", rate=8)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        pictures = [av.VideoFrame.from_ndarray(one, format="rgb24") for one in frames()]
        packets = [packet for one in (*pictures, None) for packet in stream.encode(one)]
        for index, packet in enumerate(packets):
            data = bytearray(bytes(packet))
            if index % 6 == 5:
                data[0] &= ~0x10
            hidden = av.Packet(bytes(data))
            hidden.stream, hidden.time_base = stream, packet.time_base
            hidden.pts, hidden.dts = packet.pts, packet.dts
            hidden.is_keyframe = packet.is_keyframe
            file.mux(hidden)
    answer = decode(buffer.getvalue(), VideoLimits(), FrameSampling(3))
    (length,) = HEAD.unpack_from(answer, 1)
    known = json.loads(answer[1 + HEAD.size : 1 + HEAD.size + length])
    assert (known["total_num_frames"], known["frames_indices"]) == (20, [0, 9, 19])
    for found, grey in zip(greys(answer, 3), (0, 100, 220), strict=True):
        assert abs(found - grey) < NEAR


@pytest.mark.parametrize(
    ("count", "delay", "rate"),
    [(1, None, 10.0), (5, None, 10.0), (1, 0, 10.0), (5, 0, 10.0), (1, 100, 10.0), (5, 50, 20.0)],
)
def test_frames_of_a_gif_without_delays_are_shown_as_browsers_do(
    count: int, delay: int | None, rate: float
) -> None:
    pictures = [Image.fromarray(np.full((48, 64, 3), 40 * i, np.uint8)) for i in range(count)]
    buffer = io.BytesIO()
    pictures[0].save(
        buffer, "GIF", save_all=True, append_images=pictures[1:], duration=delay or 100
    )
    data = buffer.getvalue()
    if not delay:  # the extension that holds them (GIF89a, section 23): left out, or with zeros
        shown = b"" if delay is None else b"\x21\xf9\x04\x00\x00\x00\x00\x00"
        data = re.sub(rb"\x21\xf9\x04....\x00", shown, data, flags=re.DOTALL)
    answer = decode(data, VideoLimits(), FOUR)
    (length,) = HEAD.unpack_from(answer, 1)
    known = json.loads(answer[1 + HEAD.size : 1 + HEAD.size + length])
    assert (known["total_num_frames"], known["fps"]) == (count, rate)


def test_sound_alone_is_no_video() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(BadVideo, match="no pictures"):
        decode(buffer.getvalue(), VideoLimits(), FOUR)


def test_frames_are_turned_as_the_camera_says() -> None:
    """The matrix of a track that is shown a quarter to the right: what is on top comes to the right."""
    pictures = np.zeros((4, 48, 64, 3), np.uint8)
    pictures[:, :24] = 250
    data = bytearray(written(pictures))
    matrix = data.index(b"tkhd") + 4 + 40
    one = 1 << 16
    data[matrix : matrix + 36] = struct.pack(">9i", 0, one, 0, -one, 0, 0, 48 * one, 0, 1 << 30)
    answer = decode(bytes(data), VideoLimits(), FOUR)
    (length,) = HEAD.unpack_from(answer, 1)
    found = np.frombuffer(answer, np.uint8, offset=1 + HEAD.size + length).reshape(4, 64, 48, 3)
    assert found[0, :, 30:].mean() > 240
    assert found[0, :, :18].mean() < 10


def test_transparent_pixels_are_white() -> None:
    from PIL import Image

    buffer = io.BytesIO()
    clear = [Image.new("RGBA", (16, 16), (255, 0, 0, 0)) for _ in range(3)]
    for index, picture in enumerate(clear):
        picture.paste((0, 0, 10 + index, 255), (0, 0, 8, 16))
    clear[0].save(
        buffer, "GIF", save_all=True, append_images=clear[1:], duration=100, disposal=2, loop=0
    )
    answer = decode(buffer.getvalue(), VideoLimits(), FrameSampling(1))
    (length,) = HEAD.unpack_from(answer, 1)
    found = np.frombuffer(answer, np.uint8, offset=1 + HEAD.size + length).reshape(16, 16, 3)
    assert found[:, 8:].min() == 255
    assert found[:, :8].max() < 30


def test_damaged_files_are_read_or_refused() -> None:
    """Bytes that were changed, dropped or repeated: nothing else happens, and the next file is read."""
    draw = random.Random(20261128)
    limits = VideoLimits(frame_pixels=100_000, pixels=2_000_000)
    decoder, refused = VideoDecoder(limits, FOUR, seconds=5), 0
    try:
        for kind, codec in KINDS.items():
            whole = written(frames(), kind=kind, codec=codec)
            for _ in range(12):
                data = bytearray(whole)
                for _ in range(draw.randrange(1, 6)):
                    at = draw.randrange(len(data))
                    match draw.randrange(3):
                        case 0:
                            data[at] ^= 1 << draw.randrange(8)
                        case 1:
                            del data[at : at + draw.randrange(1, 40)]
                        case _:
                            data[at:at] = data[at : at + draw.randrange(1, 40)]
                try:
                    clip = decoder(bytes(data), "here")
                except RequestError:
                    refused += 1
                else:
                    assert clip.frames.ndim == 4
            assert len(decoder(whole, "here").frames) == 4
    finally:
        decoder.close()
    assert 12 < refused < 12 * len(KINDS)
