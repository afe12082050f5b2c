"""Decoders are shared out in turns: :class:`DecoderTurns`.

Files wait in the order in which they came. A request reads its items one after the other, so that it
waits with one of them and stands behind all others with the next. A file that takes longer than the
quantum is a slow one; slow files have at most half of the decoders. Those beyond that are interrupted
when another file waits, and begin again when one of that half is free.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from headrace_core.reliability.sandbox_process import SandboxProcess
from headrace_multimodal.reading import Reading


class DecodeJob:
    """One file that is decoded, or waits for that.

    Args:
        reading: ends with the job.
    """

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.slow = False
        """True if it was interrupted; it may take its time now."""
        self.started: float | None = None
        """Clock at which a decoder began with it."""
        self.interrupted = False
        self.process: SandboxProcess | None = None


class DecoderTurns:
    """Shares decoders out. Thread-safe.

    Args:
        processes: the decoders.
        quantum: seconds after which a file is a slow one. With a single decoder none is.
        clock: in seconds.
    """

    def __init__(
        self,
        processes: list[SandboxProcess],
        quantum: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._idle, self._quantum, self._clock = list(processes), quantum, clock
        self._most_slow = len(processes) // 2 or 1
        self._alone = len(processes) == 1
        self._changed = threading.Condition()
        self._fast: deque[DecodeJob] = deque()
        self._slow: deque[DecodeJob] = deque()
        self._running: list[DecodeJob] = []

    @property
    def num_waiting(self) -> int:
        """Files that wait for a decoder."""
        with self._changed:
            return len(self._fast) + len(self._slow)

    @property
    def num_running(self) -> int:
        """Decoders that are taken."""
        with self._changed:
            return len(self._running)

    def wait(self, job: DecodeJob, seconds: float) -> SandboxProcess | None:
        """A decoder, when the job's turn has come; None: it did not in time.

        Raises:
            CancelledError: nobody waits for the job any more.
        """
        job.reading.abandoned.add_done_callback(self.look_again)
        with self._changed:
            deadline = self._clock() + seconds
            queue = self._slow if job.slow else self._fast
            queue.append(job)
            try:
                while not self._is_next(job):
                    job.reading.check()
                    now = self._clock()
                    if now >= deadline:
                        return None
                    self._interrupt_slow(now)
                    self._changed.wait(self._until_change(now, deadline))
                job.reading.check()
                return self._take(job)
            finally:
                queue.remove(job)
                self._changed.notify_all()

    def begin(self, job: DecodeJob) -> None:
        """Its decoder begins."""
        with self._changed:
            job.started = self._clock()
            self._changed.notify_all()

    def leave(self, job: DecodeJob) -> None:
        """Give the decoder back."""
        process = job.process
        assert process is not None
        with self._changed:
            self._running.remove(job)  # nobody interrupts it from here on
        if job.interrupted:
            process.kill()  # it is dying, and must not be taken for a living one
        with self._changed:
            self._idle.append(process)
            job.process, job.started = None, None
            job.slow, job.interrupted = job.slow or job.interrupted, False
            self._changed.notify_all()

    def look_again(self, _: Future[None] | None = None) -> None:
        """The clock has moved, or somebody is gone."""
        with self._changed:
            self._changed.notify_all()

    def _take(self, job: DecodeJob) -> SandboxProcess:
        job.process = self._idle.pop()
        self._running.append(job)
        return job.process

    def _is_next(self, job: DecodeJob) -> bool:
        """Slow files come first where they may run: they have waited before."""
        if not self._idle:
            return False
        runs_slow = bool(self._slow) and len(self._slow_running(self._clock())) < self._most_slow
        if job.slow:
            return runs_slow and self._slow[0] is job
        return self._fast[0] is job and not (runs_slow and len(self._idle) == 1)

    def _slow_running(self, now: float) -> list[DecodeJob]:
        return [job for job in self._running if job.slow or self._is_over(job, now)]

    def _is_over(self, job: DecodeJob, now: float) -> bool:
        """True if the job has had its quantum."""
        return not self._alone and job.started is not None and now >= job.started + self._quantum

    def _interrupt_slow(self, now: float) -> None:
        """Free the decoders that files for nobody, and slow ones beyond their half, keep from others."""
        slow = self._slow_running(now)
        for job in slow:
            if job.reading.abandoned.done():
                self._interrupt(job)
        kept = [job for job in slow if not job.interrupted]
        kept.sort(key=lambda job: (not job.slow, job.started or now))
        if self._fast and not self._idle:
            for job in kept[self._most_slow :]:
                self._interrupt(job)

    def _interrupt(self, job: DecodeJob) -> None:
        if job.started is not None and job.process is not None and not job.interrupted:
            job.interrupted = True
            job.process.interrupt()

    def _until_change(self, now: float, deadline: float) -> float:
        """Seconds until a file becomes a slow one, or the wait ends."""
        ends = [
            job.started + self._quantum for job in self._running if job.started is not None
        ]  # fmt: skip
        return min([deadline, *(end for end in ends if end > now)]) - now
