"""Packing the weights of linear layers before torch is imported: the native library alone packs, in a thread.

Importing torch takes one core and holds Python's lock. A call of the library holds no lock, so what is
packed meanwhile costs a start nothing where there is a second core. Imports no torch until a weight is taken.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace_core.errors import ConfigError, MissingDependency, WeightsError
from headrace_core.ops import PackedLinear
from headrace_kernels.cpu import library
from headrace_kernels.cpu.huge_pages import HUGE_PAGE, Region, address_of, huge_region
from headrace_kernels.mapped.cut_files import cut_files_raise

if TYPE_CHECKING:
    from headrace_core.ops import LinearOp

logger = logging.getLogger(__name__)

SMALLEST = HUGE_PAGE
"""Bytes of a weight that is worth packing ahead; smaller ones are packed by the loader."""
_CHUNK = 64 << 20
"""Bytes that one call of the library packs. Each call ends with a wait for Python's lock, and only
between two of them can packing be ended."""


class Rows(NamedTuple):
    """Rows of a weight, contiguous in a mapped file."""

    file: mmap.mmap
    offset: int
    num_rows: int


class PackJob(NamedTuple):
    """One weight [rows of all parts, in_features], to be packed."""

    name: str
    parts: tuple[Rows, ...]
    in_features: int
    dtype: str

    @property
    def out_features(self) -> int:
        return sum(part.num_rows for part in self.parts)

    @property
    def row_bytes(self) -> int:
        return self.in_features * (4 if self.dtype == "float32" else 2)

    @property
    def num_bytes(self) -> int:
        """Of the weight in the file."""
        return self.out_features * self.row_bytes


class PackingAhead:
    """Weights that a thread packs, as :meth:`headrace_kernels.cpu.ops.linear.Linear.pack` would.

    Args:
        jobs: by distinct names; their rows are within their files.

    Raises:
        MissingDependency, ConfigError: there is no native library here, or not the instruction set that was
            asked for.
    """

    def __init__(self, jobs: Sequence[PackJob]) -> None:
        self._library = library.load(library.isa())
        self._jobs = {job.name: job for job in jobs}
        self._packed: dict[str, Region] = {}
        self._scratch: Region | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="headrace-pack", daemon=True)

    def start(self, num_threads: int = 0) -> None:
        """Begin. Threads of the pool take part, but leave a core to the import of torch.

        Args:
            num_threads: at most so many; 0: as many as there are cores.
        """
        spare = min(library.usable_cores() - 1, num_threads or sys.maxsize)
        if self._library.num_threads() == 1 and spare > 1:  # nobody else has set it
            self._library.set_num_threads(spare)
        self._thread.start()

    def wait(self) -> int:
        """Wait for the thread; returns the bytes of packed weights that nobody has taken."""
        self._thread.join()
        return sum(self._size(self._jobs[name]) for name in self._packed)

    def take(self, name: str, op: LinearOp) -> PackedLinear | None:
        """A packed weight, once, for an op; None: it was not packed, or the op packs in another way."""
        from headrace_kernels.cpu.memory import as_tensor
        from headrace_kernels.cpu.ops.linear import Linear

        self._thread.join()
        region = self._packed.pop(name, None)
        if region is None or not isinstance(op, Linear) or op.isa != self._library.isa:
            return None
        job = self._jobs[name]
        size = self._size(job)
        data = as_tensor(region, size)
        return PackedLinear(job.in_features, job.out_features, job.dtype, data, size)

    def close(self) -> None:
        """End packing, and give back the memory of what nobody has taken."""
        self._stopping = True
        self._thread.join()
        self._packed.clear()

    def _run(self) -> None:
        try:
            with cut_files_raise():
                for chunk in _chunks(self._jobs.values()):
                    if self._stopping:
                        return
                    self._pack(chunk)
        except (WeightsError, OSError, MemoryError) as error:
            logger.info("weights are not packed ahead: %s", error)
            self._packed.clear()
        finally:
            self._scratch = None

    def _size(self, job: PackJob) -> int:
        code = library.DTYPES[job.dtype]
        return int(self._library.linear_packed_bytes(job.out_features, job.in_features, code))

    def _pack(self, chunk: Sequence[PackJob]) -> None:
        """Pack some weights by one call of the library, and let go of the file's pages."""
        calls: list[int] = []
        words: list[int] = []
        for job in chunk:
            region = huge_region(self._size(job))
            source = self._source(job, calls, words)
            calls += (self._library.linear_pack.packed, len(words))
            words += (
                region.address, source, job.out_features, job.in_features, job.in_features,
                library.DTYPES[job.dtype],
            )  # fmt: skip
            self._packed[job.name] = region
        code = (ctypes.c_int64 * len(calls))(*calls)
        arguments = (ctypes.c_int64 * len(words))(*words)
        status = ctypes.c_int32()
        self._library.replay(
            ctypes.addressof(code), len(calls) // 2, ctypes.addressof(arguments), 0, 0, 0,
            ctypes.addressof(status),
        )  # fmt: skip
        for job in chunk:
            for part in job.parts:
                _let_go(part, part.num_rows * job.row_bytes)

    def _source(self, job: PackJob, calls: list[int], words: list[int]) -> int:
        """Address of a weight's rows: in the file, or where calls that are added bring them together."""
        if len(job.parts) == 1:
            return address_of(job.parts[0].file) + job.parts[0].offset
        if self._scratch is None:
            several = (other for other in self._jobs.values() if len(other.parts) > 1)
            self._scratch = huge_region(max(other.num_bytes for other in several))
        at, row = self._scratch.address, job.row_bytes
        for part in job.parts:
            calls += (self._library.copy_rows.packed, len(words))
            words += (
                at, address_of(part.file) + part.offset, part.num_rows, 1, row, row, row, row, row,
            )  # fmt: skip
            at += part.num_rows * row
        return self._scratch.address


def open_packing(jobs: Sequence[PackJob]) -> PackingAhead | None:
    """Packing of weights that are large enough for it; None: there are none, or no native library."""
    large = [job for job in jobs if job.num_bytes >= SMALLEST and job.dtype in library.DTYPES]
    try:
        return PackingAhead(large) if large else None
    except (MissingDependency, ConfigError, OSError) as error:
        logger.debug("weights are not packed ahead: %s", error)
        return None


def _chunks(jobs: Iterable[PackJob]) -> Iterator[Sequence[PackJob]]:
    """Jobs in order, as many as one call is to have."""
    chunk: list[PackJob] = []
    for job in jobs:
        chunk.append(job)
        if sum(each.num_bytes for each in chunk) >= _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _let_go(part: Rows, num_bytes: int) -> None:
    """Give the pages of packed rows back to the file cache."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = -(-part.offset // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (part.offset + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        part.file.madvise(mmap.MADV_DONTNEED, first, last - first)
