"""Names and ids of adapters, on which the HTTP processes of one server agree."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from weakref import WeakValueDictionary

_LOOK = 0.01
"""Seconds between looks at a lock that another process holds."""


class Ledger:
    """Lets one change of a name happen at a time, and gives every adapter an id of its own.

    Args:
        folder: shared by all processes, private to them; None: there is only this one.
        last_id: largest id that is taken already.
    """

    def __init__(self, folder: Path | None, last_id: int) -> None:
        self._folder = folder
        self._last_id = last_id
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def changing(self, name: str) -> AsyncIterator[None]:
        """Nobody else loads or unloads an adapter of that name for the time of the block."""
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock, self._alone(hashlib.sha256(name.encode()).hexdigest()[:32]):
            yield

    @contextlib.asynccontextmanager
    async def starting(self) -> AsyncIterator[bool]:
        """For what is done once in a server's life, though processes come and go.

        Yields:
            True: nobody has done it. It counts as done if the block ends without an error.
        """
        async with self._alone("start"):
            if self._folder is None:
                yield True
                return
            done = self._folder / "adapters-started"
            yield not done.exists()
            done.touch()

    async def next_id(self) -> int:
        """An id that no adapter had before."""
        async with self._alone("ids"):
            if self._folder is not None:
                self._last_id = max(self._last_id, _number_in(self._folder / "adapters-last-id"))
            self._last_id += 1
            if self._folder is not None:
                (self._folder / "adapters-last-id").write_text(str(self._last_id))
            return self._last_id

    @contextlib.asynccontextmanager
    async def _alone(self, what: str) -> AsyncIterator[None]:
        """No other process is in a block of the same word. One that falls leaves it."""
        if self._folder is None:
            yield
            return
        file = os.open(self._folder / f"adapters-{what}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while not _locks(file):
                await asyncio.sleep(_LOOK)
            yield
        finally:
            os.close(file)


def _locks(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _number_in(path: Path) -> int:
    try:
        return int(path.read_text() or 0)
    except FileNotFoundError:
        return 0
