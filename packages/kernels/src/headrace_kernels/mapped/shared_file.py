"""A file's content as memory that processes share, and that stays what it is whatever becomes of the file.

The pages are those of the system's file cache: nothing is copied or allocated, and a second process with the
same file takes no memory for it. Who is about to write to the file, or to cut it, waits (a
:class:`~headrace_kernels.mapped.leases.ReadLease`) until the content has been copied into memory of this
process's own, at the same addresses. To remove the file, or to put another in its place, changes nothing.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import os
import threading
import weakref
from typing import Any

from headrace_kernels.cpu.huge_pages import HUGE_PAGE, address_of
from headrace_kernels.mapped.leases import ReadLease

logger = logging.getLogger(__name__)

_SLICE = 64 << 20
"""Bytes that one call copies, or asks of the system."""
_POPULATE_READ = 22
"""``MADV_POPULATE_READ``, since Linux 5.14."""
_MOVE_HERE = 3
"""``MREMAP_MAYMOVE | MREMAP_FIXED``."""
_LEAST_SHARE = 0.9
"""Share of a mapping in large pages, from which on it counts as being in those."""


class SharedFile(mmap.mmap):
    """A whole file, mapped copy-on-write, since native code is given addresses of writable memory; nobody
    writes. Made by :meth:`of`; what is made of its buffer (tensors) keeps it, and the lease with it."""

    address: int
    is_private: bool
    """True once the content is this process's own."""
    is_leased: bool
    """True if who changes the file is waited for."""
    _copying: threading.Lock

    @classmethod
    def of(cls, descriptor: int) -> SharedFile:
        """The file, from its first byte to the last that it has now.

        Args:
            descriptor: opened for reading only; the mapping does not need it afterwards.

        Raises:
            OSError: the system does not map it.
            ValueError: it is empty.
        """
        made = cls(descriptor, os.fstat(descriptor).st_size, access=mmap.ACCESS_COPY)
        made.address = address_of(made)
        made.is_private, made._copying = False, threading.Lock()
        lease = ReadLease.take(descriptor, _telling(weakref.ref(made)))
        made.is_leased = lease is not None
        if lease is not None:
            weakref.finalize(made, lease.close)
        return made

    def populate(self) -> None:
        """Have the system read the file, in large pages where it can, and map it.

        Raises:
            OSError: a part of it cannot be read, as of a file that was cut.
        """
        size = len(self)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            _advise(self.address, size, mmap.MADV_HUGEPAGE)
        for start in range(0, size, _SLICE):
            error = _advise(self.address + start, min(_SLICE, size - start), _POPULATE_READ)
            if error:
                raise OSError(error, os.strerror(error))

    def has_large_pages(self) -> bool:
        """True if the memory is in large pages, as far as the system says."""
        return _large_bytes(self.address) >= _LEAST_SHARE * len(self)

    def make_private(self) -> None:
        """Copy the content into large pages of this process's own, at the same addresses. Others may read
        meanwhile, and read the same. Done once.

        Raises:
            OSError: there is no memory for it, or no such call.
        """
        with self._copying:
            if not self.is_private:
                size = len(self)
                for start in range(0, size, _SLICE):
                    _copy_in_place(self.address + start, min(_SLICE, size - start))
                self.is_private = True


def _telling(shared: weakref.ref[SharedFile]) -> Any:
    """A function that copies the content, if anybody still needs it."""

    def told() -> None:
        found = shared()
        if found is None:
            return
        try:
            found.make_private()
            logger.info(
                "the file of packed weights is about to be changed: they were copied before"
            )
        except OSError as error:
            logger.error(
                "the file of packed weights is about to be changed, and they cannot be copied: %s",
                error,
            )

    return told


def _copy_in_place(address: int, size: int) -> None:
    """Put private memory with the same content in the place of mapped memory, by one call: there is no moment
    without.

    Args:
        address: at a large page's border, or the copy is in small pages.
    """
    libc, size = _libc(), -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    room = size + HUGE_PAGE
    rights, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    anywhere = libc.mmap(None, room, rights, kind, -1, 0)
    if anywhere == _FAILED:
        raise _last_error()
    before = (address - anywhere) % HUGE_PAGE
    copy, behind = anywhere + before, HUGE_PAGE - before
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(copy, size, mmap.MADV_HUGEPAGE)
    ctypes.memmove(copy, address, size)
    if libc.mremap(copy, size, size, _MOVE_HERE, address) == _FAILED:
        error = _last_error()
        libc.munmap(anywhere, room)
        raise error
    if before:
        libc.munmap(anywhere, before)
    if behind:
        libc.munmap(copy + size, behind)


def _advise(address: int, size: int, advice: int) -> int:
    """The error that the system answers with; 0: none."""
    return 0 if _libc().madvise(address, size, advice) == 0 else ctypes.get_errno()


def _large_bytes(address: int) -> int:
    """Bytes of the mapping at an address that are in large pages (proc(5), smaps); 0 if that is not known."""
    found = False
    try:
        with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
            for line in file:
                field, _, rest = line.partition(" ")
                if not field.endswith(":"):  # a mapping begins
                    begin, _, end = field.partition("-")
                    found = int(begin, 16) <= address < int(end, 16)
                elif (
                    found
                    and field in ("FilePmdMapped:", "AnonHugePages:")
                    and rest.split()[0] != "0"
                ):
                    return int(rest.split()[0]) << 10
    except (OSError, ValueError):
        pass
    return 0


_FAILED = ctypes.c_void_p(-1).value


def _last_error() -> OSError:
    error = ctypes.get_errno()
    return OSError(error, os.strerror(error))


@functools.cache
def _libc() -> ctypes.CDLL:
    """The C library; its calls hold no lock of Python's.

    Raises:
        OSError: it is not Linux's.
    """
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        libc.mmap.restype = libc.mremap.restype = pointer
        libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
        libc.mremap.argtypes = [pointer, size, size, number, pointer]
        libc.munmap.argtypes = [pointer, size]
        libc.madvise.argtypes = [pointer, size, number]
    except AttributeError as error:
        raise OSError(errno.ENOSYS, f"no such call here: {error}") from error
    return libc
