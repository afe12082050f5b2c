"""Decoding uploads: ``python -m headrace_multimodal.audio.decode_worker MAX_BYTES MAX_SECONDS TIME``.

The child of :class:`~headrace_multimodal.audio.decoding.AudioDecoder`. Decoders are large C libraries
that read what strangers send, so they run here: with limits on memory and processor time, without
leave to write files, and with FFmpeg confined to the one demuxer and the decoders that are on the list
and to the bytes that it is handed. Arguments: longest file, longest audio, seconds for one job.
"""

from __future__ import annotations

import io
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av
import av.error
import av.logging
import numpy as np
import soundfile

from headrace_core.reliability.sandbox_process import address_space, limit_time, serve
from headrace_multimodal.audio.decoding import DAMAGED, GOOD, AudioDecodeJob
from headrace_multimodal.audio.formats import (
    CODECS,
    DEMUXERS,
    NAMES,
    SOUNDFILE_FORMATS,
    missing_bytes,
    recognised,
    says_length,
)
from headrace_multimodal.audio.samples import BadAudio, Samples
from headrace_multimodal.memory_limit import limit_memory

SPARE_BYTES = 512 << 20
"""Memory beyond what the process has when it is ready, the file and its samples."""
BLOCK_NUMBERS = 1 << 18
"""Samples, over all channels, that are decoded at a time."""
SHORT = 0.95
"""A file that holds a smaller part of the sound that it announces was cut off."""
_SAY_LENGTH = frozenset({"mp4", "webm"})
"""Containers whose stated length is no guess."""


def decode(data: bytes, sample_rate: int, max_seconds: float) -> bytearray:
    """A file's samples: float32, one channel.

    Raises:
        BadAudio: says what is wrong with it.
    """
    kind = recognised(data)
    if kind is None:
        raise BadAudio(f"it is not a supported audio file: {NAMES}")
    if kind == "wav" and (lacking := missing_bytes(data)):
        raise BadAudio(f"cut off: {lacking} bytes of sound that it announces are not there")
    if kind in SOUNDFILE_FORMATS:
        try:
            return _with_soundfile(data, kind, sample_rate, max_seconds)
        except soundfile.LibsndfileError:
            pass  # another codec in the same container: FFmpeg may know it
    return _with_ffmpeg(data, kind, sample_rate, max_seconds)


def _with_soundfile(data: bytes, kind: str, sample_rate: int, max_seconds: float) -> bytearray:
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        samples = Samples(file.samplerate, sample_rate, max_seconds)
        announced, found = file.frames if says_length(data, kind) else 0, 0
        samples.check_seconds(announced / file.samplerate)
        size = max(1, BLOCK_NUMBERS // file.channels)
        while len(block := file.read(size, dtype="float32", always_2d=True)):
            samples.add(block)
            found += len(block)
        if found < announced * SHORT:
            raise BadAudio(f"cut off: {found} of the {announced} samples that it announces")
    return samples.finish()


def _with_ffmpeg(data: bytes, kind: str, sample_rate: int, max_seconds: float) -> bytearray:
    demuxer = DEMUXERS[kind]
    options = {
        "protocol_whitelist": "none",
        "format_whitelist": demuxer,
        "codec_whitelist": ",".join(CODECS),
    }
    with (
        _told_of_damage(),
        av.open(
            io.BytesIO(data), "r", format=demuxer, options=options, metadata_errors="replace"
        ) as container,
    ):
        if not container.streams.audio:
            raise BadAudio("no sound in it")
        stream = container.streams.audio[0]
        if stream.codec_context is None:  # no decoder at all
            raise BadAudio("its codec is not known")
        if stream.codec_context.name not in CODECS:
            raise BadAudio(f"its codec {stream.codec_context.name!r} is not read")
        stream.codec_context.thread_count = 1
        samples = Samples(stream.codec_context.sample_rate, sample_rate, max_seconds)
        announced = _announced_seconds(container, stream) if kind in _SAY_LENGTH else 0.0
        samples.check_seconds(announced)
        for block in _blocks(container, stream):
            samples.add(block)
        if samples.seconds < announced * SHORT - 0.5:
            raise BadAudio(
                f"cut off: {samples.seconds:.1f} of the {announced:.1f} seconds that it announces"
            )
        return samples.finish()


def _blocks(container: Any, stream: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Decoded audio, [frames, channels] float32, in the stream's own channels and at the rate that it
    states, which a decoder may double (HE-AAC)."""
    to_float = av.AudioResampler(format="fltp", rate=stream.codec_context.sample_rate)
    for frame in container.decode(stream):
        for part in to_float.resample(frame):
            yield part.to_ndarray().T
    for part in to_float.resample(None):
        yield part.to_ndarray().T


def _announced_seconds(container: Any, stream: Any) -> float:
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    return container.duration / 1_000_000 if container.duration else 0.0


@contextmanager
def _told_of_damage() -> Iterator[None]:
    """FFmpeg's errors in words of ours; its own may quote the file."""
    try:
        yield
    except BadAudio:
        raise
    except (av.error.FFmpegError, ValueError, EOFError, IndexError) as error:
        reason = "cut off" if isinstance(error, EOFError) else "damaged"
        raise BadAudio(f"{reason}: it cannot be decoded") from error


def main() -> None:
    """Answer until the input ends."""
    max_bytes, max_seconds, seconds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    av.logging.set_level(av.logging.PANIC)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    own = address_space()
    decode(_silence(), 8000, 1.0)  # the libraries' first call takes longer than all later ones

    def answer(message: bytes) -> bytes | bytearray:
        job = AudioDecodeJob.unpacked(message)
        numbers = int(max_seconds * job.sample_rate)
        limit = own + SPARE_BYTES + 3 * max_bytes + 8 * numbers
        limit_memory(limit)
        limit_time(seconds)
        try:
            found = decode(job.data, job.sample_rate, max_seconds)
        except BadAudio as error:
            return DAMAGED + str(error).encode()
        except MemoryError:
            return DAMAGED + b"it needs too much memory"
        found[:0] = GOOD
        return found

    serve(answer)


def _silence() -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(1600, np.float32), 16000, format="WAV", subtype="PCM_16")
    return file.getvalue()


if __name__ == "__main__":
    main()
