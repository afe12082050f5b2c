"""Device memory that can be given back and taken again at the same addresses."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Protocol


class MemoryPool(Protocol):
    """An entry point of ``headrace.memory_pools`` is a callable that makes one; its name is the device's
    type. What is allocated in it has a tag. Recordings that hold addresses stay good."""

    def use(self, tag: str) -> AbstractContextManager[None]:
        """While it is open, what this thread allocates on the device belongs to the tag."""
        ...

    def sleep(self, tags: Iterable[str], kept: Collection[str] = ()) -> None:
        """Give the memory of these tags back to the device.

        Args:
            kept: those whose content is copied to the host's memory first; others' is lost.

        Raises: CapacityError: the host has too little. What was given back until then stays so.
        """
        ...

    def wake(self, tags: Iterable[str]) -> None:
        """Take the memory of these tags again, with what was kept.

        Raises: CapacityError: the device has too little; the call may be repeated.
        """
        ...

    def num_bytes(self, tag: str) -> int:
        """Bytes of a tag that lie on the device now."""
        ...
