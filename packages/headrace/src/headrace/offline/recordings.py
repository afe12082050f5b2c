"""Recordings that offline calls are given: files, their bytes, or samples."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from typing import TYPE_CHECKING, Any

from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaItem
from headrace_core.speech.model import AudioClip

if TYPE_CHECKING:
    from headrace_multimodal.audio.decoding import AudioDecoder

Recording = str | os.PathLike[str] | bytes | bytearray | memoryview | tuple[Any, float]
"""A file's path, a file's bytes, or (samples, samples a second): [n] or [channels, n] floats, -1..1."""


def as_recordings(audio: Recording | Sequence[Recording]) -> list[Recording]:
    """One recording or many, as a list.

    Raises:
        RequestError: samples without their rate, or what is no recording.
    """
    if _is_one(audio):
        return [audio]  # type: ignore[list-item]
    if hasattr(audio, "dtype"):
        raise RequestError(
            "audio: samples must come with their rate, as (samples, rate)", param="audio"
        )
    if not isinstance(audio, Iterable) or isinstance(audio, Mapping) or hasattr(audio, "read"):
        raise _refused(audio)
    every: list[Any] = list(audio)
    for one in every:
        if not _is_one(one):
            raise _refused(one)
    return every


def _is_one(audio: object) -> bool:
    if isinstance(audio, tuple):
        return len(audio) == 2 and isinstance(audio[1], Real)
    return isinstance(audio, str | bytes | bytearray | memoryview | os.PathLike)


def _refused(audio: object) -> RequestError:
    hint = "; read() gives a file's bytes" if hasattr(audio, "read") else ""
    return RequestError(
        f"audio = {type(audio).__name__}: must be a path, a file's bytes or (samples, rate){hint}",
        param="audio",
    )


def read_ahead(
    recordings: Sequence[Recording], decoder: AudioDecoder, sample_rate: int
) -> Generator[AudioClip, None, None]:
    """Recordings as one channel of that rate, in order; the next is read while this one is in use.

    Raises:
        OSError: a file cannot be read.
        RequestError: it is no audio, or damaged; says which of several it is.
    """
    thread = ThreadPoolExecutor(1, "headrace-recordings")

    def read(index: int) -> AudioClip:
        try:
            return _read(recordings[index], decoder, sample_rate)
        except RequestError as error:
            if len(recordings) == 1:
                raise
            raise RequestError(f"audio[{index}]: {error}", param="audio") from error

    try:
        ahead = [thread.submit(read, 0)] if recordings else []
        for following in range(1, len(recordings) + 1):
            clip = ahead.pop().result()
            if following < len(recordings):
                ahead.append(thread.submit(read, following))
            yield clip
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def _read(recording: Recording, decoder: AudioDecoder, sample_rate: int) -> AudioClip:
    if isinstance(recording, tuple):
        return _resampled(*recording, sample_rate)
    if isinstance(recording, bytes | bytearray | memoryview):
        return decoder.decode_now(bytes(recording), name="", sample_rate=sample_rate)
    with open(recording, "rb") as file:
        data = file.read()
    return decoder.decode_now(data, name=os.fspath(recording), sample_rate=sample_rate)


def _resampled(samples: Any, rate: Any, sample_rate: int) -> AudioClip:
    from headrace_multimodal.audio.waveform import SAMPLE_RATE, samples_of

    if not isinstance(rate, int | float):
        rate = float(rate)  # numpy's
    item = MediaItem("audio", samples, content_hash="", metadata={SAMPLE_RATE: rate})
    return AudioClip(samples_of(item, sample_rate), sample_rate)
