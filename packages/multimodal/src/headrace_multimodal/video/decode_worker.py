"""Decoding videos: ``python -m headrace_multimodal.video.decode_worker LIMITS SAMPLING SECONDS``, the first
two as JSON.

The child of :class:`~headrace_multimodal.video.decoding.VideoDecoder`: with limits on memory and processor
time, without leave to write files, and with FFmpeg confined to the demuxer and the decoders that are on
the list and to the bytes that it is handed. Answers what the video is, as JSON behind its length, then the
sampled frames; or what is wrong.
"""

from __future__ import annotations

import io
import json
import resource
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import av
import av.error
import av.logging
import numpy as np
import numpy.typing as npt

from headrace_core.reliability.sandbox_process import address_space, limit_time, serve
from headrace_multimodal.decoder_pool import DAMAGED, GOOD
from headrace_multimodal.memory_limit import limit_memory
from headrace_multimodal.video.formats import CODECS, DEMUXERS, NAMES, recognised
from headrace_multimodal.video.gif_delays import with_delays
from headrace_multimodal.video.limits import VideoLimits
from headrace_multimodal.video.sampling import FrameSampling

Pixels = npt.NDArray[np.uint8]
"""[height, width, 3], RGB."""
HEAD = struct.Struct("<I")
"""Length of the JSON."""
SPARE_BYTES = 512 << 20
"""Memory beyond what the process has when it is ready, the file and its frames."""
SHORT = 0.95
"""A file that holds a smaller part of the frames that it announces was cut off."""
_SAY_LENGTH = frozenset({DEMUXERS["webm"]})
"""Containers that state their length, and no number of frames."""
WHITE = 255


class BadVideo(Exception):
    """Why a file gives no frames."""


class _FewerFrames(Exception):
    """Not every packet holds a frame that is shown: some codecs have others, to predict from.

    Args:
        count: of those that are shown.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


class _Track(NamedTuple):
    """The pictures of an open file."""

    container: Any
    stream: Any
    height: int
    width: int
    """As the file states them; frames may say otherwise."""


def decode(data: bytes, limits: VideoLimits, sampling: FrameSampling) -> bytearray:
    """Frames of a file, as the child answers them.

    Raises:
        BadVideo: says what is wrong with it.
    """
    kind = recognised(data)
    if kind is None:
        raise BadVideo(f"the video is not one of {NAMES}")
    if kind == "gif":
        data = with_delays(data)
    with _told_of_damage():
        with _opened(data, kind) as track:
            total, rate = _counted(track, limits)
        try:
            return _sampled(data, kind, limits, sampling.indices(total, rate), total, rate)
        except _FewerFrames as fewer:
            total = fewer.count
        return _sampled(data, kind, limits, sampling.indices(total, rate), total, rate)


def _sampled(
    data: bytes, kind: str, limits: VideoLimits, indices: list[int], total: int, rate: float
) -> bytearray:
    """Raises: _FewerFrames: there are less than ``total``."""
    with _opened(data, kind) as track:
        limits.check(len(indices), track.height, track.width)
        return _answer(_frames(track, indices), indices, total, rate)


@contextmanager
def _opened(data: bytes, kind: str) -> Iterator[_Track]:
    demuxer = DEMUXERS[kind]
    options = {
        "protocol_whitelist": "none",
        "format_whitelist": demuxer,
        "codec_whitelist": ",".join(CODECS),
    }
    file = io.BytesIO(data)
    with av.open(file, "r", format=demuxer, options=options, metadata_errors="replace") as opened:
        if not opened.streams.video:
            raise BadVideo("the file has no pictures")
        stream = opened.streams.video[0]
        if stream.codec_context is None:  # no decoder at all
            raise BadVideo("the video's codec is not known")
        if stream.codec_context.name not in CODECS:
            raise BadVideo(f"the video's codec {stream.codec_context.name!r} is not read")
        stream.codec_context.thread_count = 1
        if not (stream.height and stream.width):
            raise BadVideo("the video has no size")
        yield _Track(opened, stream, stream.height, stream.width)


def _counted(track: _Track, limits: VideoLimits) -> tuple[int, float]:
    """Frames, and frames a second, without decoding any: a packet holds one frame at most."""
    stream = track.stream
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    if not rate > 0:
        raise BadVideo("the video has no frame rate")
    total, hidden, end = 0, 0, 0.0
    for packet in track.container.demux():
        if packet.dts is not None:
            end = max(end, float(packet.dts * packet.time_base))
        if packet.stream_index == stream.index and packet.size:
            total, hidden = total + (not packet.is_discard), hidden + packet.is_discard
        if total > limits.seconds * rate:
            raise BadVideo(
                f"the video is longer than {limits.seconds:g} s, at {rate:g} frames a second"
            )
    _check_whole(track, total + hidden, end)
    if not total:
        raise BadVideo("the video has no frames")
    return total, rate


def _check_whole(track: _Track, count: int, end: float) -> None:
    """
    Args:
        count: packets of pictures that are there.
        end: seconds at which the last packet of any kind begins.

    Raises:
        BadVideo: the file announces more.
    """
    frames = track.stream.frames
    if count < frames * SHORT:
        raise BadVideo(f"the video is cut off: {count} of the {frames} frames are there")
    seconds = (track.container.duration or 0) / 1_000_000
    if track.container.format.name in _SAY_LENGTH and end < seconds * SHORT - 0.5:
        raise BadVideo(f"the video is cut off: {end:.1f} of the {seconds:.1f} seconds are there")


def _frames(track: _Track, indices: list[int]) -> Iterator[Pixels]:
    """The frames of ascending indices; nothing behind the last is decoded."""
    done, index = 0, -1
    for index, frame in enumerate(track.container.decode(track.stream)):
        if index == indices[done]:
            yield _pixels(frame, track)
            done += 1
        if done == len(indices):
            return
    if index < 0:
        raise BadVideo("the video is damaged: none of its frames can be decoded")
    raise _FewerFrames(index + 1)


def _pixels(frame: Any, track: _Track) -> Pixels:
    """A frame in the size that the file states, turned as the camera says, on white."""
    has_alpha = any(component.is_alpha for component in frame.format.components)
    shown = frame.reformat(
        width=track.width, height=track.height, format="rgba" if has_alpha else "rgb24"
    ).to_ndarray()
    if has_alpha:
        alpha = shown[..., 3:].astype(np.uint16)
        shown = (shown[..., :3] * alpha + WHITE * (255 - alpha) + 127) // 255
    turned = np.rot90(shown, round(frame.rotation / 90))
    return np.ascontiguousarray(turned, np.uint8)


def _answer(frames: Iterator[Pixels], indices: list[int], total: int, rate: float) -> bytearray:
    found, shape = bytearray(), (0, 0)
    for frame in frames:
        if found and shape != frame.shape[:2]:
            raise BadVideo("the video is damaged: its frames are turned differently")
        shape = frame.shape[:2]
        found += frame.data.cast("B")
    head = json.dumps(
        {
            "fps": rate,
            "duration": total / rate,
            "total_num_frames": total,
            "frames_indices": indices,
            "height": shape[0],
            "width": shape[1],
        }
    ).encode()
    found[:0] = GOOD + HEAD.pack(len(head)) + head
    return found


@contextmanager
def _told_of_damage() -> Iterator[None]:
    """FFmpeg's errors in words of ours; its own may quote the file."""
    try:
        yield
    except BadVideo:
        raise
    except av.error.FFmpegError as error:
        raise BadVideo("the video is damaged and cannot be decoded") from error
    except ValueError as error:
        raise BadVideo(str(error)) from error


def main() -> None:
    """Answer until the input ends."""
    limits = VideoLimits(**json.loads(sys.argv[1]))
    sampling, seconds = FrameSampling(**json.loads(sys.argv[2])), float(sys.argv[3])
    av.logging.set_level(av.logging.PANIC)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    most = address_space() + SPARE_BYTES + 3 * limits.encoded_bytes
    # Decoders keep some frames that others refer to; the answer is made of all that are sampled.
    most += 24 * limits.frame_pixels + 7 * limits.pixels
    limit_memory(most)

    def answer(message: bytes) -> bytes | bytearray:
        limit_time(seconds)
        try:
            return decode(message, limits, sampling)
        except BadVideo as error:
            return DAMAGED + str(error).encode()
        except MemoryError:
            return DAMAGED + b"the video needs too much memory"

    serve(answer)


if __name__ == "__main__":
    main()
