"""A few child processes that decode files of clients and can be killed: :class:`DecoderPool`."""

from __future__ import annotations

import logging

from headrace_core.errors import GenerateError, QueueFull, RequestError
from headrace_core.reliability.sandbox_process import ProcessEnded, SandboxProcess, TookTooLong
from headrace_multimodal.decoder_turns import DecodeJob, DecoderTurns
from headrace_multimodal.reading import current

logger = logging.getLogger(__name__)

GOOD, DAMAGED = b"\0", b"\1"
"""First byte of a child's answer: the decoded file follows, or what is wrong with it."""
START_SECONDS = 120.0
"""Wall-clock limit of starting a child, which imports libraries."""
WAIT_SECONDS = 60.0
"""Seconds that a thread waits for a child to be free, beside what one file may take."""
QUANTUM = 0.1
"""Part of the seconds of a file after which it is a slow one; see
:mod:`headrace_multimodal.decoder_turns`."""


class DecoderPool:
    """Hands files to children; one that hangs or crashes is replaced. Thread-safe.

    Args:
        module: run as ``python -m module``; answers :data:`GOOD` or :data:`DAMAGED`, then bytes.
        argv: its arguments.
        what: what a file is, for messages: ``image``.
        max_bytes: of a file.
        seconds: of processor time to decode one.
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
        self.turns = DecoderTurns(self._processes, QUANTUM * seconds)

    def decode(self, data: bytes, where: str, *, size: int | None = None) -> memoryview:
        """A child's answer about a file, behind :data:`GOOD`.

        Args:
            data: what the child is asked: the file, perhaps behind settings.
            where: request field that errors name.
            size: bytes of the file; None: all of ``data``.

        Raises:
            RequestError: the file is over a limit, of no known format, damaged, or too slow.
            QueueFull: all processes are busy.
            GenerateError: no process could be started; the log says why.
            CancelledError: nobody waits for the file any more.
        """
        size = len(data) if size is None else size
        if size > self._max_bytes:
            raise RequestError(
                f"{where}: {self._what} of {size} bytes: at most {self._max_bytes} are accepted",
                param=where,
            )
        job, answer = DecodeJob(current()), None
        while answer is None:
            answer = self._tried(job, data, where)
        if not answer.startswith(GOOD):
            raise RequestError(f"{where}: {answer[len(DAMAGED) :].decode()}", param=where)
        return memoryview(answer)[len(GOOD) :]

    def _tried(self, job: DecodeJob, data: bytes, where: str) -> bytes | None:
        """A child's answer; None: the child was interrupted, as others wait.

        Raises: as :meth:`decode`.
        """
        what = self._what
        process = self.turns.wait(job, WAIT_SECONDS + self._seconds)
        if process is None:
            raise QueueFull(f"too many {what}s wait to be decoded", retry_after=1.0)
        try:
            self._start(process)
            self.turns.begin(job)
            answer = process.ask(data, self._seconds)
            job.reading.admit()  # with the decoder in hand, so that no more are held than there are places
            return answer
        except TookTooLong as error:
            raise RequestError(f"{where}: decoding the {what} {error}", param=where) from None
        except ProcessEnded:
            if not job.interrupted:
                raise RequestError(
                    f"{where}: the {what} is damaged, or needs too much memory", param=where
                ) from None
            job.reading.check()
            return None
        finally:
            self.turns.leave(job)

    def _start(self, process: SandboxProcess) -> None:
        """Raises: GenerateError: the child does not start, whatever file it is for."""
        cause: OSError | None = None
        try:
            process.start()
        except OSError as error:
            cause = error
        if not process.running:
            why = cause or "the child ended, or was not ready in time; what it wrote stands above"
            logger.error("a process that decodes %ss did not start: %s", self._what, why)
            raise GenerateError(f"a process that decodes {self._what}s did not start") from cause

    def close(self) -> None:
        """End the processes. Idempotent."""
        for process in self._processes:
            process.interrupt()
