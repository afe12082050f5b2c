"""Writes blocks in a thread, so that steps do not wait for a disk."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict

from headrace_distributed.kv_connectors.block_folder import BlockFolder

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 256 << 20
"""Most bytes that wait to be written; what comes on top is left out."""


class BackgroundWriter:
    """The way into a folder.

    Args:
        folder: where to.
        max_bytes: see :data:`MAX_PENDING_BYTES`.
    """

    def __init__(self, folder: BlockFolder, max_bytes: int = MAX_PENDING_BYTES) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._pending: OrderedDict[bytes, bytes] = OrderedDict()
        self._pending_bytes = 0
        self._changed = threading.Condition()
        self._closing = self._warned = False
        self._thread: threading.Thread | None = None
        self.num_dropped = 0
        """Blocks that were left out."""

    def write(self, key: bytes, content: bytes) -> None:
        """Have a block written soon."""
        with self._changed:
            if key in self._pending or self._closing:
                return
            if self._pending_bytes + len(content) > self._max_bytes:
                self.num_dropped += 1
                return
            self._pending[key] = content
            self._pending_bytes += len(content)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="headrace-kv-writer", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def pending(self, key: bytes) -> bytes | None:
        """A block that is not written yet."""
        with self._changed:
            return self._pending.get(key)

    def close(self) -> None:
        """Write what waits, and end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._closing:
                    self._changed.wait()
                if not self._pending:
                    return
                key, content = next(iter(self._pending.items()))
            try:
                self._folder.save(key, memoryview(content))
            except OSError as error:
                self._warn(error)
            with self._changed:
                del self._pending[key]
                self._pending_bytes -= len(content)

    def _warn(self, error: OSError) -> None:
        """Log the first failure; a full disk has one for each block."""
        level = logging.DEBUG if self._warned else logging.WARNING
        logger.log(level, "KV transfer: a block could not be written: %s", error)
        self._warned = True
