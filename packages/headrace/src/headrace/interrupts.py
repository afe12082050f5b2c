"""Ctrl-C while a command loads: the process ends at once, whatever it is doing.

``KeyboardInterrupt`` alone does not do that. Libraries swallow it while they are imported, native code
does not see it, and closing an engine waits for the worker, which reads weights.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended: 128 and the signal's number, as shells count."""
GRACE_SECONDS = 0.6
"""Seconds that the way out by ``KeyboardInterrupt`` may take; then the process ends without it."""


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Within the block, SIGINT raises ``KeyboardInterrupt``; if the process still runs after
    :data:`GRACE_SECONDS`, it ends with status :data:`INTERRUPTED`.

    After the signal the block ends with ``KeyboardInterrupt``, whatever else it raises, and also if
    it raises nothing. It is for the main thread of a process that may end at any moment; in another
    thread the block has no effect.

    Raises:
        KeyboardInterrupt: SIGINT came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = threading.Event()

    def hear(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    # A handler runs between two instructions of the main thread, which native code may keep busy; the
    # byte is written at once.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = signal.signal(signal.SIGINT, hear)
    threading.Thread(
        target=_end_after_signal, args=(reader,), name="headrace-interrupt", daemon=True
    ).start()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(wakeup)
        os.close(writer)
        if interrupted.is_set():  # in place of what a library made of the interrupt
            raise KeyboardInterrupt from None


def leave_interrupted() -> NoReturn:
    """End the process now: threads and libraries that are busy are not waited for."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(INTERRUPTED)


def _end_after_signal(reader: int) -> None:
    """Wait for SIGINT, then for the grace; returns when nobody can signal any more."""
    while signalled := os.read(reader, 1):
        if signalled[0] == signal.SIGINT:
            threading.Event().wait(GRACE_SECONDS)
            os._exit(INTERRUPTED)
    os.close(reader)
