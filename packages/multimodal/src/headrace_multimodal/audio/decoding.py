"""Uploaded audio, decoded in child processes that can be killed: :class:`AudioDecoder`."""

from __future__ import annotations

import asyncio
import importlib.util
import queue
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace_core.errors import MissingDependency, QueueFull, RequestError
from headrace_core.reliability.sandbox_process import ProcessEnded, SandboxProcess, TookTooLong
from headrace_core.speech.model import AudioClip
from headrace_multimodal.audio.decoded_limit import HeldAudio

LIBRARIES = ("soundfile", "av", "soxr")
INSTALL = "pip install 'headrace[audio]'"
GOOD, DAMAGED = b"\0\0\0\0", b"\1"
"""First bytes of a child's answer, before the samples or the error. Four bytes, so that samples are
aligned. Each begins with the one that :mod:`headrace_multimodal.decoder_pool` knows."""
START_SECONDS = 120.0
"""Wall-clock limit of starting a child, which imports the libraries."""
MAX_WAITING = 64
"""Files that may wait for a child."""
WAIT_SECONDS = 300.0
"""Seconds that a thread waits for its file, and in proportion longer where files may take longer than by
default; nobody waits so long on an event loop."""
_HEAD = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class AudioLimits:
    """Budgets of one file."""

    file_bytes: int = 25 << 20
    seconds: float = 7200.0
    """Seconds of sound, whatever the file's size: 25 MB may hold days."""
    decode_seconds: float = 60.0
    """Of processor time; then the child is killed."""
    held_seconds: float = 28_800.0
    """Seconds of sound in all files that are decoded and still in use; at least one file's."""


class AudioDecodeJob(NamedTuple):
    """File for a child to decode."""

    data: bytes
    sample_rate: int

    def packed(self) -> bytes:
        return _HEAD.pack(self.sample_rate) + self.data

    @classmethod
    def unpacked(cls, message: bytes) -> AudioDecodeJob:
        return cls(message[_HEAD.size :], *_HEAD.unpack_from(message))


def check_libraries() -> None:
    """Raises: MissingDependency naming the first library that is not installed, and the extra."""
    for library in LIBRARIES:
        if importlib.util.find_spec(library) is None:
            raise MissingDependency(library, needed_for="transcribing audio", install=INSTALL)


class AudioDecoder:
    """Decodes files in a few processes; one that hangs or crashes is replaced.

    Args:
        limits: of one file.
        processes: how many; so many files are decoded at once, others wait.

    Raises:
        MissingDependency: a library is not installed.
    """

    def __init__(self, limits: AudioLimits | None = None, processes: int = 1) -> None:
        check_libraries()
        self.limits = limits or AudioLimits()
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker(self.limits) for _ in range(processes)]
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(processes, "headrace-audio")
        self._held = HeldAudio(max(self.limits.held_seconds, self.limits.seconds))
        self._lock = threading.Lock()
        self._num_jobs = 0

    def warm_up(self) -> None:
        """Start the processes now, not with the first file. Returns at once."""
        for _ in self._workers:
            self._threads.submit(self._start_one)

    def _start_one(self) -> None:
        worker = self._idle.get_nowait()  # as many as threads
        try:
            worker.start()
        finally:
            self._idle.put(worker)

    async def decode(self, data: bytes, *, name: str, sample_rate: int) -> AudioClip:
        """A file as one channel. Cancelling the call ends the work.

        Args:
            data: the file.
            name: what the client calls it, for messages; nothing is concluded from it.
            sample_rate: of the result.

        Raises:
            RequestError: over a limit, of no known format, damaged or cut off; says which.
            QueueFull: too many files wait, or too much sound is in use.
        """
        with self._admitted(data):
            task = _Task(self._idle, AudioDecodeJob(data, sample_rate))
            try:
                answer = await asyncio.wrap_future(self._threads.submit(task.run))
            except asyncio.CancelledError:
                task.cancel()
                raise
            except _Unfit as error:
                raise _refused(name, error) from error
        return self._clip(answer, sample_rate)

    def decode_now(self, data: bytes, *, name: str, sample_rate: int) -> AudioClip:
        """:meth:`decode` for a thread, which waits. Raises: the same."""
        with self._admitted(data):
            task = _Task(self._idle, AudioDecodeJob(data, sample_rate))
            try:
                longer = max(1.0, self.limits.decode_seconds / AudioLimits().decode_seconds)
                answer = self._threads.submit(task.run).result(WAIT_SECONDS * longer)
            except TimeoutError:
                task.cancel()
                raise QueueFull(
                    "too many audio files wait to be decoded", retry_after=1.0
                ) from None
            except _Unfit as error:
                raise _refused(name, error) from error
        return self._clip(answer, sample_rate)

    @contextmanager
    def _admitted(self, data: bytes) -> Iterator[None]:
        """Count a file that is not too large, while there are not too many."""
        if len(data) > self.limits.file_bytes:
            raise _too_large(len(data), self.limits.file_bytes)
        with self._lock:
            if self._num_jobs >= MAX_WAITING:
                raise QueueFull(f"{self._num_jobs} audio files wait to be decoded", retry_after=1.0)
            self._num_jobs += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_jobs -= 1

    def _clip(self, answer: bytes, sample_rate: int) -> AudioClip:
        clip = AudioClip(np.frombuffer(answer, np.float32, offset=len(GOOD)), sample_rate)
        self._held.add(clip)
        return clip

    def close(self) -> None:
        """End the processes. Idempotent."""
        for worker in self._workers:
            worker.interrupt()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.kill()


def _refused(name: str, error: _Unfit) -> RequestError:
    return RequestError(f"file {name[:100]!r}: {error}", param="file")


def _too_large(size: int, most: int) -> RequestError:
    return RequestError(
        f"file: {size} bytes; at most {most} ({most / (1 << 20):g} MiB) are taken", param="file"
    )


class _Unfit(Exception):
    """Why there are no samples."""


class _Worker:
    """One child."""

    def __init__(self, limits: AudioLimits) -> None:
        self._limits = limits
        self._process = SandboxProcess(
            "headrace_multimodal.audio.decode_worker",
            str(limits.file_bytes), str(limits.seconds), str(limits.decode_seconds),
            start_seconds=START_SECONDS,
        )  # fmt: skip

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def start(self) -> None:
        self._process.start()

    def decode(self, job: AudioDecodeJob) -> bytes:
        """Raises: _Unfit."""
        try:
            answer = self._process.ask(job.packed(), self._limits.decode_seconds)
        except TookTooLong as error:
            raise _Unfit(f"decoding it {error}") from None
        except ProcessEnded:
            raise _Unfit("damaged, or it needs too much memory: decoding it failed") from None
        if not answer.startswith(GOOD):
            raise _Unfit(answer[len(DAMAGED) :].decode())
        return answer

    def interrupt(self) -> None:
        self._process.interrupt()

    def kill(self) -> None:
        self._process.kill()


class _Task:
    """One job, in a thread until a worker has done it.

    The threads' queue keeps it until its turn, though its client has left; without the file.
    """

    def __init__(self, idle: queue.SimpleQueue[_Worker], job: AudioDecodeJob) -> None:
        self._idle = idle
        self._lock = threading.Lock()
        self._job: AudioDecodeJob | None = job
        """None: the request was cancelled."""
        self._worker: _Worker | None = None
        self._interrupted = False

    def run(self) -> bytes:
        """Raises: _Unfit."""
        worker = self._idle.get_nowait()  # as many as threads
        try:
            with self._lock:
                if self._job is None:
                    raise _Unfit("the request was cancelled")
                job, self._worker = self._job, worker
            return worker.decode(job)
        finally:
            with self._lock:
                self._worker = None
            if self._interrupted:
                # Its process may have answered first, and be dying under the next file.
                worker.kill()
            self._idle.put(worker)

    def cancel(self) -> None:
        """Have nobody wait for it: the worker's process is killed if it is at it."""
        with self._lock:
            self._job = None
            if self._worker is not None:
                self._interrupted = True
                self._worker.interrupt()
