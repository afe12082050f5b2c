"""A lease on a file: whoever opens it to write, or cuts it, waits until its holder was told and gives it
back (``fcntl(2)``, ``F_SETLEASE``). Linux, on file systems of its own; others give none."""

from __future__ import annotations

import os
import signal
import struct
import threading
from collections.abc import Callable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_SET_OWNER, _THREAD = 15, 0
"""``F_SETOWN_EX`` and ``F_OWNER_TID``, which Python does not name: the signal goes to one thread."""


class ReadLease:
    """The right to be told before a file's content may change; see :meth:`take`.

    The system waits for ``/proc/sys/fs/lease-break-time`` (45 s), then takes the lease away.
    """

    def __init__(self, descriptor: int, told: Callable[[], None]) -> None:
        self._descriptor, self._told = os.dup(descriptor), told
        self._signal = signal.SIGRTMIN + 7
        self._began, self._closing, self._held = threading.Event(), False, False
        self._thread = threading.Thread(target=self._wait, name="headrace-lease", daemon=True)

    @classmethod
    def take(cls, descriptor: int, told: Callable[[], None]) -> ReadLease | None:
        """A lease on an open file; None: the system gives none, as while somebody has it open to write.

        Args:
            descriptor: opened for reading only.
            told: called once, in a thread, when somebody is about to change the file; when it returns, the
                lease is given back.
        """
        if fcntl is None or not hasattr(fcntl, "F_SETLEASE") or not hasattr(signal, "sigwaitinfo"):
            return None
        lease = cls(descriptor, told)
        lease._thread.start()
        lease._began.wait(_LONGEST)
        return lease if lease._held else None

    def close(self) -> None:
        """Give it back. May be called again."""
        self._closing = True
        if self._thread.is_alive() and self._thread.ident is not None:
            signal.pthread_kill(self._thread.ident, self._signal)

    def _wait(self) -> None:
        # Blocked in this thread, to which alone the signal goes: nothing else of the process sees it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {self._signal})
        try:
            try:
                owner = struct.pack("ii", _THREAD, threading.get_native_id())
                fcntl.fcntl(self._descriptor, _SET_OWNER, owner)
                fcntl.fcntl(self._descriptor, fcntl.F_SETSIG, self._signal)
                fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                self._held = True
            except OSError:
                return
            finally:
                self._began.set()
            signal.sigwaitinfo({self._signal})
            if not self._closing:
                self._told()
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        finally:
            os.close(self._descriptor)


_LONGEST = 60.0
"""Seconds that the thread may take to begin."""
