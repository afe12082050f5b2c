"""Packing the weights of linear layers before torch is imported: the native library alone packs, in a thread.

Importing torch takes one core and holds Python's lock. A call of the library holds no lock, so what is
packed meanwhile costs a start little where there is a second core. Weights that an earlier start has left
in a file (:mod:`~headrace_kernels.cpu.packed_file`) are mapped instead. Imports no torch until a weight is
taken.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace_core.errors import ConfigError, MissingDependency, WeightsError
from headrace_core.ops import PackedLinear
from headrace_kernels.cpu import library
from headrace_kernels.cpu.huge_pages import HUGE_PAGE, Region, address_of, huge_region
from headrace_kernels.cpu.library import Library
from headrace_kernels.cpu.packed_file import PackedFile, places
from headrace_kernels.mapped.cut_files import cut_files_raise
from headrace_kernels.mapped.shared_file import SharedFile

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


class WeightPacker:
    """Packs weights as :meth:`headrace_kernels.cpu.ops.linear.Linear.pack` would, some at a time.

    Args:
        jobs: by distinct names; their rows are within their files.

    Raises:
        MissingDependency, ConfigError: there is no native library here, or not the instruction set that was
            asked for.
    """

    def __init__(self, jobs: Sequence[PackJob]) -> None:
        self.library: Library = library.load(library.isa())
        self.jobs = {job.name: job for job in jobs}
        self._scratch: Region | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each packed weight, by name, in order."""
        return {name: self.size(job) for name, job in self.jobs.items()}

    def size(self, job: PackJob) -> int:
        """Bytes of one packed weight."""
        code = library.DTYPES[job.dtype]
        return int(self.library.linear_packed_bytes(job.out_features, job.in_features, code))

    def packed(
        self, is_ended: Callable[[], bool] = bool, *, one_by_one: bool = False
    ) -> Iterator[tuple[PackJob, Region]]:
        """Each weight with its packed form, in order; ends when ``is_ended`` says so.

        Args:
            one_by_one: each by a call of its own, in which steps that run meanwhile wait for threads.

        Raises:
            OSError, MemoryError: there is no memory for it.
        """
        try:
            for chunk in _chunks(self.jobs.values(), 1 if one_by_one else _CHUNK):
                if is_ended():
                    return
                yield from zip(chunk, self._pack(chunk), strict=True)
        finally:
            self._scratch = None

    def _pack(self, chunk: Sequence[PackJob]) -> list[Region]:
        """Pack some weights by one call of the library, and let go of the file's pages."""
        calls: list[int] = []
        words: list[int] = []
        regions = []
        for job in chunk:
            region = huge_region(self.size(job))
            source = self._source(job, calls, words)
            calls += (self.library.linear_pack.packed, len(words))
            words += (
                region.address, source, job.out_features, job.in_features, job.in_features,
                library.DTYPES[job.dtype],
            )  # fmt: skip
            regions.append(region)
        code = (ctypes.c_int64 * len(calls))(*calls)
        arguments = (ctypes.c_int64 * len(words))(*words)
        status = ctypes.c_int32()
        self.library.replay(
            ctypes.addressof(code), len(calls) // 2, ctypes.addressof(arguments), 0, 0, 0,
            ctypes.addressof(status), 0,
        )  # fmt: skip
        for job in chunk:
            for part in job.parts:
                _let_go(part, part.num_rows * job.row_bytes)
        return regions

    def _source(self, job: PackJob, calls: list[int], words: list[int]) -> int:
        """Address of a weight's rows: in the file, or where calls that are added bring them together."""
        if len(job.parts) == 1:
            return address_of(job.parts[0].file) + job.parts[0].offset
        if self._scratch is None:
            several = (other for other in self.jobs.values() if len(other.parts) > 1)
            self._scratch = huge_region(max(other.num_bytes for other in several))
        at, row = self._scratch.address, job.row_bytes
        for part in job.parts:
            calls += (self.library.copy_rows.packed, len(words))
            words += (
                at, address_of(part.file) + part.offset, part.num_rows, 1, row, row, row, row, row,
            )  # fmt: skip
            at += part.num_rows * row
        return self._scratch.address


class PackingAhead:
    """Weights that a thread packs, or maps from a file.

    Args:
        jobs, raises: as :class:`WeightPacker`.
        file: where an earlier start may have left them; None: nowhere.
    """

    def __init__(self, jobs: Sequence[PackJob], file: PackedFile | None = None) -> None:
        self._packer, self._file = WeightPacker(jobs), file
        self.expects_file = file is not None and not file.is_missing(self._packer.sizes)
        """True if the weights will be mapped, as far as is known before: the checkpoint is not read then."""
        self._packed: dict[str, Region] = {}
        self._shared: weakref.ref[SharedFile] | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="headrace-pack", daemon=True)

    def start(self, num_threads: int = 0) -> None:
        """Begin. Threads of the pool take part, but leave a core to the import of torch.

        Args:
            num_threads: at most so many; 0: as many as there are cores.
        """
        spare = min(library.usable_cores() - 1, num_threads or sys.maxsize)
        if self._packer.library.num_threads() == 1 and spare > 1:  # nobody else has set it
            self._packer.library.set_num_threads(spare)
        self._thread.start()

    def wait(self) -> int:
        """Wait for the thread; returns the bytes of packed weights that nobody has taken."""
        self._thread.join()
        return sum(self._packer.size(self._packer.jobs[name]) for name in self._packed)

    @property
    def is_mapped(self) -> bool:
        """True if the weights are pages of a file, which take no memory from anybody. Known after
        :meth:`wait`."""
        return self._shared is not None

    def take(self, name: str, op: LinearOp) -> PackedLinear | None:
        """A packed weight, once, for an op; None: it was not packed, or the op packs in another way."""
        from headrace_kernels.cpu.memory import as_tensor
        from headrace_kernels.cpu.ops.linear import Linear

        self._thread.join()
        region, library_ = self._packed.pop(name, None), self._packer.library
        if region is None or not isinstance(op, Linear) or op.isa != library_.isa:
            return None
        job = self._packer.jobs[name]
        size = self._packer.size(job)
        data = as_tensor(region, size)
        return PackedLinear(job.in_features, job.out_features, job.dtype, data, size)

    def settle(self) -> None:
        """Copy mapped weights that are in small pages into large ones, at the same addresses. Steps may run
        meanwhile.

        Raises:
            OSError: there is no memory for it.
        """
        shared = None if self._shared is None else self._shared()
        if shared is not None and not shared.has_large_pages():
            shared.make_private()
            logger.info("packed weights of the file were copied into large pages")

    def close(self) -> None:
        """End packing, and give back the memory of what nobody has taken."""
        self._stopping = True
        self._thread.join()
        self._packed.clear()

    def _run(self) -> None:
        if self._file is not None and self._map(self._file):
            return
        try:
            with cut_files_raise():
                for job, region in self._packer.packed(lambda: self._stopping):
                    self._packed[job.name] = region
        except (WeightsError, OSError, MemoryError) as error:
            logger.info("weights are not packed ahead: %s", error)
            self._packed.clear()

    def _map(self, file: PackedFile) -> bool:
        sizes = self._packer.sizes
        shared = file.find(sizes)
        if shared is None:
            return False
        for name, (offset, _) in places(sizes).items():
            self._packed[name] = Region(shared, offset, shared.address + offset)
        self._shared = weakref.ref(shared)
        logger.info(
            "%d packed weights, %.1f MiB, are mapped from a file", len(sizes), len(shared) / 2**20
        )
        return True


def open_packing(jobs: Sequence[PackJob], file: PackedFile | None = None) -> PackingAhead | None:
    """Packing of weights that are large enough for it; None: there are none, or no native library."""
    large = large_enough(jobs)
    try:
        return PackingAhead(large, file) if large else None
    except (MissingDependency, ConfigError, OSError) as error:
        logger.debug("weights are not packed ahead: %s", error)
        return None


def large_enough(jobs: Iterable[PackJob]) -> list[PackJob]:
    """The jobs that are worth it, of dtypes that the library packs."""
    return [job for job in jobs if job.num_bytes >= SMALLEST and job.dtype in library.DTYPES]


def _chunks(jobs: Iterable[PackJob], least: int) -> Iterator[Sequence[PackJob]]:
    """Jobs in order, at least so many bytes of them for each call."""
    chunk: list[PackJob] = []
    for job in jobs:
        chunk.append(job)
        if sum(each.num_bytes for each in chunk) >= least:
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
