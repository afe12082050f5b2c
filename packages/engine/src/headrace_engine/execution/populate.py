"""Making the cache's memory resident ahead of its use.

The system gives memory when it is first written: the prompt whose keys and values come first to a
block pays for that, which on a virtual machine can cost more than computing them. A thread of low
priority does it while the engine has other things to do, some way ahead of the highest block in
use, so that memory which is never needed is never taken.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

logger = logging.getLogger(__name__)

_LIVING: weakref.WeakSet[CachePopulator] = weakref.WeakSet()
"""Those of all engines of this process."""


def populated_bytes() -> int:
    """Bytes of caches that were made resident in this process and are held.

    The process's resident set grows by them at any time, also while another engine measures what it
    takes itself.
    """
    return sum(populator.num_bytes for populator in list(_LIVING))


def unwritten_bytes() -> int:
    """Bytes of this process's caches that are promised and that the system has not given yet: it still
    calls them free."""
    return sum(populator.total_bytes - populator.num_bytes for populator in list(_LIVING))


_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: fault pages in, change no content
_PIECE = 8 << 20
"""Bytes populated by one call: how long a stop waits."""
_PAGE = 4096
WHOLE = -1
"""Value of ``ahead_bytes`` for all of the cache."""
_IDLE = 19
"""Niceness of the thread: it takes what nobody else wants."""


def _madvise() -> ctypes._NamedFuncPointer:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise


class CachePopulator:
    """Populates the first blocks of the cache's tensors, and further ones as blocks are used.

    Args:
        buffers: bytes of the cache, each with all blocks in ascending order.
        num_blocks: in each buffer.
        ahead_bytes: of all buffers together, to be resident beyond the highest block in use;
            ``WHOLE``: everything, before :meth:`start` returns.
        num_threads: that populate a whole cache.
    """

    def __init__(
        self, buffers: Sequence[Tensor], num_blocks: int, ahead_bytes: int, num_threads: int = 1
    ) -> None:
        self._buffers = list(buffers)
        self._num_blocks = num_blocks
        self._whole, self._num_threads = ahead_bytes == WHOLE, num_threads
        self.total_bytes = total = sum(buffer.numel() for buffer in self._buffers)
        """Size of the whole cache."""
        self._ahead = num_blocks if self._whole else -(-ahead_bytes * num_blocks // max(1, total))
        self._target = min(self._ahead, num_blocks)
        self._done = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.num_bytes = 0
        """Populated so far."""
        _LIVING.add(self)

    @property
    def num_populated(self) -> int:
        """Blocks that are resident, or that the system would not populate."""
        return self._done

    def start(self) -> None:
        """Begin, if this system can; otherwise memory comes at its first use, as ever."""
        if not self._ahead or not sys.platform.startswith("linux"):
            return
        if self._whole:
            self._populate_whole()
            return
        self._thread = threading.Thread(target=self._run, name="cache-populator", daemon=True)
        self._thread.start()

    def used(self, block_id: int) -> None:
        """A block came into use; cheap if enough is resident ahead of it."""
        # Only once half of it is used up: until then a burst of requests lives on what was made
        # ready while nobody waited, and has the cores for itself.
        if self._target - (block_id + 1) >= self._ahead // 2 or self._target == self._num_blocks:
            return
        with self._changed:
            self._target = min(block_id + 1 + self._ahead, self._num_blocks)
            self._changed.notify()

    def close(self) -> None:
        """Stop and let go of the cache. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        self._buffers = []
        self.num_bytes = self.total_bytes = 0

    def _populate_whole(self) -> None:
        begin, madvise = time.perf_counter(), _madvise()

        def populate(buffer: Tensor) -> bool:
            return self._populate(madvise, buffer.data_ptr(), 0, buffer.numel())

        size = sum(buffer.numel() for buffer in self._buffers) / (1 << 30)
        logger.info("making %.1f GiB of cache resident (up to a second a gigabyte)", size)
        with ThreadPoolExecutor(self._num_threads) as threads:
            try:
                complete = all(threads.map(populate, self._buffers))
            except BaseException:
                self._closing = True  # or the threads would go on to the end before this goes up
                raise
        if complete:
            self._done = self._num_blocks
            self.num_bytes = sum(buffer.numel() for buffer in self._buffers)
            logger.info("cache made resident in %.1f s", time.perf_counter() - begin)

    def _run(self) -> None:
        madvise = _madvise()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _IDLE)
        while self._wait():
            first, last = self._done, self._target
            for buffer in self._buffers:
                size = buffer.numel() // self._num_blocks
                if not self._populate(madvise, buffer.data_ptr(), first * size, last * size):
                    return
            self._done = last

    def _wait(self) -> bool:
        """Until there is something to do; False if that will never be."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._target > self._done)
            return not self._closing

    def _populate(self, madvise: ctypes._NamedFuncPointer, base: int, start: int, end: int) -> bool:
        """False if the system cannot, or the engine stops."""
        at = (base + start) // _PAGE * _PAGE
        limit = base + end
        while at < limit and not self._closing:
            size = min(_PIECE, limit - at)
            if madvise(at, size, _POPULATE_WRITE) != 0:
                reason = os.strerror(ctypes.get_errno())
                logger.info("the cache's memory comes at its first use: %s", reason)
                return False
            at += size
            self.num_bytes += size
        return not self._closing
