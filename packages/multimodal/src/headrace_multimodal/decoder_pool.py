"""A few child processes that decode files of clients and can be killed: :class:`DecoderPool`."""

from __future__ import annotations

import queue

from headrace_core.errors import QueueFull, RequestError
from headrace_core.sandbox_process import ProcessEnded, SandboxProcess, TookTooLong

GOOD, DAMAGED = b"\0", b"\1"
"""First byte of a child's answer: the decoded file follows, or what is wrong with it."""
START_SECONDS = 120.0
"""Wall-clock limit of starting a child, which imports libraries."""
WAIT_SECONDS = 60.0
"""Seconds that a thread waits for a child to be free, beside what one file may take."""


class DecoderPool:
    """Hands files to children; one that hangs or crashes is replaced. Thread-safe.

    Args:
        module: run as ``python -m module``; answers :data:`GOOD` or :data:`DAMAGED`, then bytes.
        argv: its arguments.
        what: what a file is, for messages: ``image``.
        max_bytes: of a file.
        seconds: of decoding one, on the wall clock.
        processes: how many; so many files are decoded at once.
    """

    def __init__(
        self,
        module: str,
        *argv: str,
        what: str,
        max_bytes: int,
        seconds: float,
        processes: int,
    ) -> None:
        self._what, self._max_bytes, self._seconds = what, max_bytes, seconds
        self._processes = [
            SandboxProcess(module, *argv, start_seconds=START_SECONDS) for _ in range(processes)
        ]
        self._idle: queue.LifoQueue[SandboxProcess] = queue.LifoQueue()
        for process in self._processes:
            self._idle.put(process)

    def decode(self, data: bytes, where: str) -> memoryview:
        """A child's answer about a file, behind :data:`GOOD`.

        Args:
            where: request field that errors name.

        Raises:
            RequestError: the file is over a limit, of no known format, damaged, or too slow.
            QueueFull: all processes are busy.
        """
        what = self._what
        if len(data) > self._max_bytes:
            raise RequestError(
                f"{where}: {what} of {len(data)} bytes: at most {self._max_bytes} are accepted",
                param=where,
            )
        try:
            process = self._idle.get(timeout=WAIT_SECONDS + self._seconds)
        except queue.Empty:
            raise QueueFull(f"too many {what}s wait to be decoded", retry_after=1.0) from None
        try:
            answer = process.ask(data, self._seconds)
        except TookTooLong as error:
            raise RequestError(f"{where}: decoding the {what} {error}", param=where) from None
        except ProcessEnded:
            raise RequestError(
                f"{where}: the {what} is damaged, or needs too much memory", param=where
            ) from None
        finally:
            self._idle.put(process)
        if not answer.startswith(GOOD):
            raise RequestError(f"{where}: {answer[len(DAMAGED) :].decode()}", param=where)
        return memoryview(answer)[len(GOOD) :]

    def close(self) -> None:
        """End the processes. Idempotent."""
        for process in self._processes:
            process.interrupt()
