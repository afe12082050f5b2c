"""Nothing may be left behind: threads, children, open files, shared memory."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

SETTLE_SECONDS = 30.0
"""Seconds that ending things may take to end."""
_LASTING = ("/dev/", "anon_inode:", "/proc/", "/sys/")
"""Files of libraries that stay open once they were used (event loops' pollers, terminals)."""


@dataclass(frozen=True)
class Holdings:
    """Resources of this process, by names that compare."""

    threads: frozenset[str] = field(default_factory=frozenset)
    """Name and identity."""
    children: frozenset[int] = field(default_factory=frozenset)
    """Process ids."""
    files: frozenset[str] = field(default_factory=frozenset)
    """Number and target of open file descriptors."""
    shared_memory: frozenset[str] = field(default_factory=frozenset)
    """Files of this user below ``/dev/shm``."""

    @classmethod
    def now(cls) -> Holdings:
        """As of now. Files, children and shared memory are known on Linux only."""
        return cls(
            threads=frozenset(f"{t.name} ({t.ident})" for t in threading.enumerate()),
            children=frozenset(_children()),
            files=frozenset(_open_files()),
            shared_memory=frozenset(_shared_memory()),
        )

    def beyond(self, before: Holdings) -> list[str]:
        """Resources that are there now and were not before, in words."""
        found = [f"thread {name}" for name in sorted(self.threads - before.threads)]
        found += [f"child process {pid}" for pid in sorted(self.children - before.children)]
        found += [f"open file {name}" for name in sorted(self.files - before.files)]
        found += [
            f"shared memory {name}" for name in sorted(self.shared_memory - before.shared_memory)
        ]
        return found


@contextmanager
def guarded_resources() -> Iterator[None]:
    """Fail with an AssertionError if the block leaves something behind, given
    :data:`SETTLE_SECONDS` to end it."""
    gc.collect()
    before = Holdings.now()
    yield
    deadline = time.monotonic() + SETTLE_SECONDS
    while left := Holdings.now().beyond(before):
        gc.collect()
        assert time.monotonic() < deadline, f"left behind: {'; '.join(left)}"
        time.sleep(0.05)


def _children() -> Iterator[int]:
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            yield from map(int, path.read_text(encoding="ascii").split())
        except OSError:
            continue  # that thread has just ended


def _open_files() -> Iterator[str]:
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return
    for number in numbers:
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the listing's own
        if not target.startswith(_LASTING):
            yield f"{number}: {target}"


def _shared_memory() -> Iterator[str]:
    user = os.getuid()
    for path in Path("/dev/shm").glob("*"):
        try:
            if path.stat().st_uid == user:
                yield path.name
        except OSError:
            continue
