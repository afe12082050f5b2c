"""Images of requests, decoded in child processes that can be killed: :class:`ImageDecoder`."""

from __future__ import annotations

import queue

import numpy as np

from headrace_core.errors import QueueFull, RequestError
from headrace_core.sandbox_process import ProcessEnded, SandboxProcess, TookTooLong
from headrace_multimodal.images.decode_worker import GOOD, SIZE
from headrace_multimodal.images.pixels import ImageLimits, Pixels

START_SECONDS = 60.0
"""Wall-clock limit of starting a child."""
WAIT_SECONDS = 60.0
"""Seconds that a thread waits for a child to be free."""


class ImageDecoder:
    """Decodes files in a few processes; one that hangs or crashes is replaced. Thread-safe.

    Args:
        limits: of one file.
        seconds: of decoding one, on the wall clock.
        processes: how many; so many files are decoded at once.
    """

    def __init__(
        self, limits: ImageLimits | None = None, *, seconds: float = 10.0, processes: int = 2
    ) -> None:
        self.limits, self._seconds = limits or ImageLimits(), seconds
        words = (str(self.limits.encoded_bytes), str(self.limits.pixels), str(seconds))
        module = "headrace_multimodal.images.decode_worker"
        self._processes = [
            SandboxProcess(module, *words, start_seconds=START_SECONDS) for _ in range(processes)
        ]
        self._idle: queue.LifoQueue[SandboxProcess] = queue.LifoQueue()
        for process in self._processes:
            self._idle.put(process)

    def __call__(self, data: bytes, where: str) -> Pixels:
        """A file's pixels.

        Args:
            data: the file.
            where: request field that errors name.

        Raises:
            RequestError: over a limit, of no known format, damaged, or too slow.
            QueueFull: all processes are busy.
        """
        if len(data) > self.limits.encoded_bytes:
            raise RequestError(
                f"{where}: image of {len(data)} bytes: at most {self.limits.encoded_bytes} are accepted",
                param=where,
            )
        try:
            process = self._idle.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            raise QueueFull("too many images wait to be decoded", retry_after=1.0) from None
        try:
            answer = process.ask(data, self._seconds)
        except TookTooLong as error:
            raise RequestError(f"{where}: decoding the image {error}", param=where) from None
        except ProcessEnded:
            raise RequestError(
                f"{where}: the image is damaged, or needs too much memory", param=where
            ) from None
        finally:
            self._idle.put(process)
        if not answer.startswith(GOOD):
            raise RequestError(f"{where}: {answer[1:].decode()}", param=where)
        height, width = SIZE.unpack_from(answer, len(GOOD))
        pixels = np.frombuffer(answer, np.uint8, offset=len(GOOD) + SIZE.size)
        return pixels.reshape(height, width, 3)

    def close(self) -> None:
        """End the processes. Idempotent."""
        for process in self._processes:
            process.interrupt()
