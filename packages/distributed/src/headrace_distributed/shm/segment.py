"""Memory that processes of one host share, and that is gone with the last of them.

A segment has no name in any file system: it is a file that exists only as long as a process holds it
(``memfd``). Others open it through the descriptor of the process that made it, which the kernel allows for
processes of the same user. So ``kill -9`` leaves nothing behind, and no limit of a mounted ``/dev/shm``
applies.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass

from headrace_core.errors import CapacityError
from headrace_distributed.errors import GroupError

_ADD_SEALS = 1033
_SEAL, _SHRINK, _GROW = 1, 2, 4  # fcntl has names for these from Python 3.12 on


@dataclass(frozen=True, slots=True)
class SegmentHandle:
    """How other processes find a segment."""

    pid: int
    descriptor: int
    inode: int
    """A descriptor's number may be another file's once its file is closed."""

    def __str__(self) -> str:
        return f"{self.pid}:{self.descriptor}:{self.inode}"


def parse_handle(text: str) -> SegmentHandle:
    """Read what a handle was written as.

    Raises:
        ValueError: it is none.
    """
    try:
        pid, descriptor, inode = (int(part) for part in text.split(":"))
    except ValueError:
        raise ValueError(
            f"{text!r} is not a segment's handle: must be PID:DESCRIPTOR:INODE"
        ) from None
    return SegmentHandle(pid, descriptor, inode)


def create_segment(name: str, size: int) -> int:
    """A descriptor of a new segment of ``size`` bytes, all zero, of fixed size.

    Args:
        name: shown in ``/proc/PID/maps``.

    Raises:
        CapacityError: there is not so much memory.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
        # Nobody can cut it, which would kill whoever reads beyond its end.
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL | _SHRINK | _GROW)
    except OSError as error:
        os.close(descriptor)
        raise CapacityError(
            f"{size} bytes of shared memory could not be allocated: {error.strerror}"
        ) from error
    return descriptor


def handle_of(descriptor: int) -> SegmentHandle:
    """The handle of a segment that this process holds; good while it does."""
    return SegmentHandle(os.getpid(), descriptor, os.fstat(descriptor).st_ino)


def open_segment(handle: SegmentHandle, size: int) -> int:
    """A descriptor of another process's segment.

    Raises:
        GroupError: it is not there any more, or not of ``size`` bytes.
    """
    path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
    gone = f"process {handle.pid} does not hold this shared memory any more ({path})"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise GroupError(gone) from error
    except OSError as error:
        raise GroupError(
            f"shared memory of process {handle.pid} cannot be opened ({path}): {error.strerror}"
        ) from error
    status = os.fstat(descriptor)
    if (status.st_ino, status.st_size) != (handle.inode, size):
        os.close(descriptor)
        raise GroupError(gone)
    return descriptor
