"""A worker's memory while its engine sleeps. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from contextlib import AbstractContextManager

from headrace_engine.sleep.engine_sleep import KV_CACHE, TAGS, WEIGHTS
from headrace_engine.sleep.memory_pool import MemoryPool


class SleepingMemory:
    """The memory of a worker's weights and cache. One thread only.

    Args:
        pool: has both, if the device's memory can be given back below objects that stay. None: objects are
            freed, and made again.
    """

    def __init__(self, pool: MemoryPool | None = None) -> None:
        self._pool = pool
        self._asleep: set[str] = set()
        self._kept: set[str] = set()
        """Tags of :attr:`_asleep` whose objects are still there."""

    def region(self, tag: str) -> AbstractContextManager[None]:
        """While it is open, what is allocated belongs to the tag."""
        return contextlib.nullcontext() if self._pool is None else self._pool.use(tag)

    @property
    def keeps(self) -> bool:
        """True if objects may stay while their memory sleeps."""
        return self._pool is not None

    def sleep(self, keep: bool) -> None:
        """Give all memory back.

        Args:
            keep: the weights' content is copied to the host's memory, and objects stay. Else whoever used
                them has let them go.

        Raises:
            CapacityError: see :meth:`headrace_engine.sleep.memory_pool.MemoryPool.sleep`; all is as before.
        """
        if self._pool is None:
            return
        self._asleep, self._kept = set(TAGS), set(TAGS) if keep else set()
        try:
            self._pool.sleep(TAGS, kept=(WEIGHTS,) if keep else ())
        except BaseException:
            self._pool.wake(TAGS)
            self._asleep = self._kept = set()
            raise

    def wake(self, tag: str) -> bool:
        """Take the memory of a tag again; True if its objects are there, as good as before, but for the
        cache's content.

        Raises:
            CapacityError: see :meth:`headrace_engine.sleep.memory_pool.MemoryPool.wake`; it sleeps on.
        """
        if self._pool is None or tag not in self._asleep:
            return False
        self._pool.wake([tag])
        self._asleep.discard(tag)
        is_there = tag in self._kept
        self._kept.discard(tag)
        return is_there

    def forget(self, tags: Collection[str] = (WEIGHTS, KV_CACHE)) -> None:
        """The objects of these tags were let go."""
        self._kept.difference_update(tags)
