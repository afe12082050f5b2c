"""The numbers of this machine that the model of scaling wants, measured with the engine's own kernels.

Reading is that of a product with one row, whose weights lie beyond the caches (or in them); multiplying
that of 32 and of 512 rows; a meeting is a job of the kernels' pool in which all threads wait for each other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.bench.results import Bar
from headrace.planning.devices import cores_by_node
from headrace.planning.machine import Machine
from headrace_core.errors import ConfigError
from headrace_engine.cores import physical_cores, usable_cores

if TYPE_CHECKING:
    from headrace_core.ops import PackedLinear

SECONDS = 0.12
"""Of each measurement, at least."""
LEAST_BYTES, MOST_BYTES = 256 << 20, 1 << 30
"""Of the weight that is read: beyond the caches, where that is possible."""
PART_OF_MEMORY = 16
"""The weight takes such a part of the free memory at most."""
CACHED_BYTES = 1 << 20, 32 << 20
"""Fewest and most bytes of the weight that is read from the cache."""
INPUTS, OUTPUTS = 1024, 4096
"""Of a product that is timed for its multiplications."""
MANY_ROWS, FEW_ROWS = 512, 32
JOBS = 20
"""In which threads meet before the clock is read again: few, so that some are not disturbed."""
LINES_OF_A_START = 8
"""Times that two threads pass a line of memory in a job: where there are no more threads to tell, a start is
taken to be so many."""
PANELS = {"avx2": 32, "portable": 16}
"""Outputs of a panel by instruction set; the others have 64."""


class Topology(NamedTuple):
    """Cores that this process may use, one for each physical core, by node."""

    nodes: tuple[tuple[int, ...], ...]

    @property
    def cores(self) -> tuple[int, ...]:
        return tuple(core for node in self.nodes for core in node)

    @property
    def cores_of_node(self) -> int:
        """That every node has."""
        return min(map(len, self.nodes))

    def first(self, threads: int) -> tuple[int, ...]:
        """Cores for threads that fill one node after the other; empty on one node: the system places them."""
        return self.evened[:threads] if len(self.nodes) > 1 else ()

    def each(self, threads: int) -> tuple[int, ...]:
        """Cores for as many threads on each node, those of the first node first."""
        share = threads // len(self.nodes)
        return tuple(core for node in self.nodes for core in node[:share])

    @property
    def evened(self) -> tuple[int, ...]:
        """As many cores of each node."""
        return tuple(core for node in self.nodes for core in node[: self.cores_of_node])


class ThreadNumbers(NamedTuple):
    """What so many threads did."""

    read: float
    """Bytes a second."""
    products: float
    """Operations a second, with many rows."""
    meeting: float
    """Seconds of a job; 0 for one thread."""


class Measured(NamedTuple):
    """A machine, and what it was made of."""

    machine: Machine
    by_threads: Mapping[int, ThreadNumbers]


def this_topology() -> Topology:
    """The machine's, as far as this process may use it."""
    cores = physical_cores(usable_cores())
    return Topology(tuple(cores_by_node(cores)))


def last_level_cache(cores: Collection[int], root: Path = Path("/")) -> int:
    """Bytes of the last-level caches that some cores have together; 0 where the system does not say.

    Args:
        root: the file system that has ``sys``.
    """
    sizes: dict[str, int] = {}
    for core in cores:
        levels: dict[int, tuple[str, int]] = {}
        folder = root / f"sys/devices/system/cpu/cpu{core}/cache"
        for index in folder.glob("index[0-9]*"):
            try:
                level, shared, size = (
                    (index / name).read_text().strip()
                    for name in ("level", "shared_cpu_list", "size")
                )
            except OSError:
                continue
            if level.isdigit() and size[:-1].isdigit() and size.endswith("K"):
                levels[int(level)] = (shared, 1024 * int(size[:-1]))
        if levels:
            shared, size_of = levels[max(levels)]
            sizes[shared] = size_of
    return sum(sizes.values())


class MachineMeter:
    """Measures a machine.

    Args:
        topology: its cores.
        dtype: of the products: the model's activations.
        free_memory: bytes.
        step_bytes: that a step of the model reads: as many are read from the cache.

    Raises:
        ConfigError: the native kernels are not there.
    """

    def __init__(self, topology: Topology, dtype: str, free_memory: int, step_bytes: float) -> None:
        from headrace_kernels.cpu import library

        absent = library.why_absent()
        if absent is not None:
            raise ConfigError(
                f"model of scaling: needs headrace's native CPU kernels: {absent}", field="kernels"
            )
        self._topology, self._dtype = topology, dtype
        self._library = library.load(library.isa())
        self._panel = PANELS.get(library.isa(), 64)
        self._cache = last_level_cache(topology.nodes[0])
        least, most = CACHED_BYTES
        self._cached_bytes = min(self._cache // 4, most, max(least, int(step_bytes)))
        wanted = max(LEAST_BYTES, 2 * self._cache)
        self._bytes = max(8 << 20, min(wanted, MOST_BYTES, free_memory // PART_OF_MEMORY))
        self._weight: PackedLinear | None = None

    def steps(self, threads: Sequence[int]) -> int:
        """Times that :meth:`measure` updates its bar."""
        return len(self._counts(threads)) + 1

    def measure(self, threads: Sequence[int], bar: Bar) -> Measured:
        """The machine, and what each number of threads did.

        Args:
            threads: numbers that the model is asked about.
        """
        found: dict[int, ThreadNumbers] = {}
        for count in self._counts(threads):
            found[count] = self._of_threads(count)
            bar.update(1)
        with self._pool(1, self._topology.first(1)) as ops:
            few = self._product_rate(ops, FEW_ROWS)
            size = self._cached_bytes
            cached = self._read_rate(ops, self._pack(ops, size)) if size else 0.0
        far, link = self._far() if len(self._topology.nodes) > 1 else (0.0, float("inf"))
        self._weight = None
        bar.update(1)
        node = self._topology.cores_of_node
        within = [each.read for count, each in found.items() if count <= node]
        start, line, far_line = meeting_costs(
            {count: each.meeting for count, each in found.items() if count > 1}, node
        )
        return Measured(
            Machine(
                nodes=len(self._topology.nodes), cores=node, core_read=found[1].read,
                node_read=max(within), far_core_read=far, link=link,
                core_products=found[1].products, core_few_products=few, start=start, line=line,
                far_line=far_line, cache=self._cache, core_cache_read=cached, panel=self._panel,
            ),
            found,
        )  # fmt: skip

    def _counts(self, threads: Sequence[int]) -> list[int]:
        """Those asked for, and what the model needs to know."""
        node = self._topology.cores_of_node
        return sorted({1, *({2} if node > 1 else ()), node, *threads})

    def _of_threads(self, count: int) -> ThreadNumbers:
        with self._pool(count, self._topology.first(count)) as ops:
            if self._weight is None or len(self._topology.nodes) > 1:  # pages lie where threads are
                self._weight = None
                self._weight = self._pack(ops, self._bytes)
            return ThreadNumbers(
                self._read_rate(ops, self._weight),
                self._product_rate(ops, MANY_ROWS),
                0.0 if count == 1 else self._meeting(),
            )

    def _far(self) -> tuple[float, float]:
        """One core's reading of another node's memory, and that of all of its node's cores."""
        here, there = self._topology.nodes[:2]
        with self._pool(len(here), here) as ops:
            self._weight = None
            self._weight = self._pack(ops, self._bytes)
        with self._pool(1, there[:1]) as ops:
            one = self._read_rate(ops, self._weight)
        with self._pool(len(there), there) as ops:
            return one, self._read_rate(ops, self._weight)

    @contextmanager
    def _pool(self, threads: int, cores: Sequence[int]) -> Iterator[Mapping[str, Any]]:
        """Ops on so many threads; bound where cores are named, the calling thread, too."""
        import torch

        from headrace_core.ops import KernelNeed
        from headrace_kernels.cpu.provider import PROVIDER

        before = os.sched_getaffinity(0) if cores else None
        of_torch = torch.get_num_threads()
        torch.set_num_threads(1)  # threads that it started now would stay on these cores
        try:
            ops = PROVIDER.operations(KernelNeed("cpu", self._dtype, threads, tuple(cores)))
            if cores:
                os.sched_setaffinity(0, cores[:1])
            yield ops
        finally:
            if before is not None:
                os.sched_setaffinity(0, before)
            self._library.bind_threads(())
            torch.set_num_threads(of_torch)

    def _pack(self, ops: Mapping[str, Any], num_bytes: int) -> PackedLinear:
        """A weight of about so many bytes."""
        import torch

        dtype = getattr(torch, self._dtype)
        outputs = max(self._panel, num_bytes // (INPUTS * dtype.itemsize))
        packed: PackedLinear = ops["linear"].pack(torch.zeros(outputs, INPUTS, dtype=dtype))
        return packed

    def _read_rate(self, ops: Mapping[str, Any], weight: PackedLinear) -> float:
        import torch

        row = torch.zeros(1, INPUTS, dtype=getattr(torch, self._dtype))
        return weight.num_bytes / best_seconds(lambda: ops["linear"](row, weight))

    def _product_rate(self, ops: Mapping[str, Any], rows: int) -> float:
        import torch

        dtype = getattr(torch, self._dtype)
        packed = ops["linear"].pack(torch.zeros(OUTPUTS, INPUTS, dtype=dtype))
        x = torch.zeros(rows, INPUTS, dtype=dtype)
        seconds = best_seconds(lambda: ops["linear"](x, packed))
        return 2.0 * rows * INPUTS * OUTPUTS / seconds

    def _meeting(self) -> float:
        return best_seconds(lambda: self._library.rendezvous(JOBS)) / JOBS


def best_seconds(
    work: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """The shortest of three calls or more, for :data:`SECONDS`, after one that does not count."""
    work()
    best, calls, end = float("inf"), 0, clock() + SECONDS
    while True:
        begin = clock()
        work()
        now = clock()
        best, calls = min(best, now - begin), calls + 1
        if calls >= 3 and now >= end:
            return best


def meeting_costs(meetings: Mapping[int, float], node: int) -> tuple[float, float, float]:
    """``start``, ``line`` and ``far_line`` of a :class:`~headrace.planning.machine.Machine`.

    Args:
        meetings: seconds of a job, by the number of threads, 2 and more.
        node: cores of a node.
    """
    if not meetings:
        return 0.0, 0.0, 0.0
    fewest, most = min(meetings), max(meetings)
    start = meetings[fewest]
    within = max((count for count in meetings if count <= node), default=fewest)
    line = start / LINES_OF_A_START
    if within > fewest:
        line = max(0.0, meetings[within] - start) / (within - fewest)
    far_line = 4 * line
    if most > node and most > within:
        far_line = max(line, (meetings[most] - meetings[within]) / (most - within))
    return start, line, far_line
