"""A file's bytes as tensors: mapped, or read whole by several threads."""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headrace_core.errors import CapacityError, WeightsError
from headrace_models.checkpoint.regular_file import open_regular

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 32 << 20
READERS = 4
"""Threads that read one file: what a network file system needs to be busy."""


class Content:
    """The bytes of one file. They live as long as a tensor that looks into them.

    Args:
        eager: read the whole file now, instead of mapping it.

    Raises:
        WeightsError: it cannot be read.
        CapacityError: the system has no memory, or no addresses, for it.
    """

    def __init__(self, path: Path, *, eager: bool = False) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                self._bytes = _read_whole(file.fileno()) if eager else _mapped(file.fileno())
        except MemoryError:
            raise _too_large(path) from None
        except (OSError, ValueError) as error:  # ValueError: a mapping of nothing
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise _too_large(path) from error
            raise WeightsError(f"{path}: cannot be read: {error}") from error

    def view(self, name: str, dtype: torch.dtype, offset: int, num_bytes: int) -> Tensor:
        """A one-dimensional tensor over a range, nothing copied.

        Args:
            name: of the tensor; for messages.

        Raises:
            WeightsError: the file ends before.
        """
        if offset + num_bytes > len(self._bytes):
            raise WeightsError(f"{self.path}: tensor {name!r} ends after the file (it has changed)")
        if isinstance(self._bytes, mmap.mmap) and self._bytes.size() < offset + num_bytes:
            raise WeightsError(
                f"{self.path}: was cut while it was read: {self._bytes.size()} bytes are left of "
                f"{len(self._bytes)}, tensor {name!r} ends at byte {offset + num_bytes}"
            )
        if not num_bytes:  # torch looks into no empty buffer
            return torch.empty(0, dtype=dtype)
        count = num_bytes // dtype.itemsize
        return torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=offset)

    def let_go(self, offset: int, num_bytes: int) -> None:
        """Give a range's pages back to the file cache: what was packed need not count as ours.
        Whoever still looks gets them again."""
        if isinstance(self._bytes, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
            last = (offset + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                self._bytes.madvise(mmap.MADV_DONTNEED, first, last - first)


def _too_large(path: Path) -> CapacityError:
    size = path.stat().st_size / (1 << 30)
    return CapacityError(
        f"{path}: the system refused {size:.2f} GiB of memory for it: free memory, raise the limit of the "
        "process (ulimit -v, the container's), or use a smaller model; the file itself is sound"
    )


def _mapped(file: int) -> mmap.mmap:
    # Copy-on-write, because torch has no read-only tensors; nobody writes.
    return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)


def _read_whole(file: int) -> bytearray:
    size = os.fstat(file).st_size
    whole = bytearray(size)

    def read(start: int) -> None:
        with memoryview(whole)[start : min(start + CHUNK_BYTES, size)] as rest:
            done = 0
            while done < len(rest):
                count = os.preadv(file, [rest[done:]], start + done)
                if not count:
                    raise OSError("it was cut short while it was read")
                done += count

    with ThreadPoolExecutor(READERS) as readers:
        for _ in readers.map(read, range(0, size, CHUNK_BYTES)):
            pass
    return whole
