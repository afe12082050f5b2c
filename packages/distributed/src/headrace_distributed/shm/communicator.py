"""Communicator of ranks on one host, through memory that they share (native/src/group.cpp).

Sums are taken in the order of ranks, in float32, and rounded once. A small tensor is added up by every
rank, a large one in parts, each by one rank; both give the same bits. A rank that dies wakes nobody, so
ranks that wait look after the others ten times in a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from headrace_core.errors import CaptureRefused, ConfigError
from headrace_core.parallel import Communicator
from headrace_distributed.arguments import check_ranks, check_source, normal_dim, on_cpu
from headrace_distributed.errors import CallMismatch, GroupError, PeerLost, PeerTimeout
from headrace_distributed.peers import Peer, introduce, on_one_host
from headrace_distributed.rendezvous import DEFAULT_TIMEOUT, connect, exchange, wait_for_value
from headrace_distributed.shm import library
from headrace_distributed.shm.segment import (
    create_segment,
    handle_of,
    open_segment,
    parse_handle,
)  # fmt: skip

SLOT_BYTES = 512 << 10
"""Of a rank's two slots each. A larger tensor goes through in pieces."""
_CALLS = (
    "nothing",
    "joining",
    "barrier",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
)


def create(
    rank: int,
    world_size: int,
    rendezvous: str,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    slot_bytes: int = SLOT_BYTES,
) -> Communicator:
    """Join a group; returns when all ranks have joined.

    Args:
        rank: of this process, 0-based.
        world_size: number of ranks, at most 64.
        rendezvous: ``tcp://HOST:PORT/NAME``, the same for all ranks.
        timeout: seconds to wait for another rank, here and in every operation.
        slot_bytes: of a rank's two slots each, the same for all ranks; a multiple of 64 KiB.

    Raises:
        ConfigError: ranks are on several hosts, or a setting is not what it may be.
        MissingDependency: the native library was not built.
        PeerTimeout: a rank has not joined in time; names it.
        CapacityError: there is not enough memory for the segment.
    """
    check_ranks(rank, world_size)
    most = library.load().hr_group_most_ranks()
    if world_size > most:
        raise ConfigError(f"communicator 'shm' takes up to {most} ranks, got {world_size}")
    if slot_bytes <= 0 or slot_bytes % (64 << 10):
        raise ConfigError(f"slot_bytes = {slot_bytes} must be a multiple of {64 << 10}")
    store = connect(rendezvous, timeout)
    peers = introduce(store, rank, world_size, timeout)
    if not on_one_host(peers):
        raise ConfigError(
            "communicator 'shm' needs all ranks on one host, where they see each other's processes: "
            "use 'gloo'"
        )
    return SharedMemory(rank, peers, store, timeout, slot_bytes)


def one_round_bytes(world_size: int) -> int:
    """Bytes of a piece up to which every rank adds up everything, in one round instead of two.

    Two ranks read as much in one round as in two. With more ranks a second round costs about what reading
    this many bytes of each rank does (benchmarks/all_reduce.py).
    """
    return sys.maxsize if world_size <= 2 else (128 << 10) // (world_size - 1)


class SharedMemory(Communicator):
    """Ranks that talk through shared memory; see :func:`create`."""

    def __init__(
        self, rank: int, peers: Sequence[Peer], store: Store, timeout: float, slot_bytes: int
    ) -> None:
        self._rank, self._peers, self._timeout = rank, tuple(peers), timeout
        self._library = library.load()
        self._group: int | None = None
        self._record: Callable[[Any, tuple[Any, ...]], None] | None = None
        descriptor = self._segment(store, slot_bytes)
        try:
            self._group = self._library.hr_group_open(
                descriptor, rank, len(peers), slot_bytes, one_round_bytes(len(peers)),
                self._spin_ns(store), int(timeout * 1e9),
            )  # fmt: skip
            if self._group is None:
                raise library.why_not_opened(f"rank {rank}")
            # When all have joined, all have opened the segment: its maker may close the descriptor.
            self._check("joining", self._library.hr_group_join(self._group))
        finally:
            os.close(descriptor)

    def _segment(self, store: Store, slot_bytes: int) -> int:
        size = self._library.hr_group_bytes(self.world_size, slot_bytes)
        if self.rank == 0:
            descriptor = create_segment("headrace-group", size)
            store.set("segment", str(handle_of(descriptor)))
            return descriptor
        handle = wait_for_value(store, "segment", 0, self.world_size, self._timeout)
        return open_segment(parse_handle(handle), size)

    def _spin_ns(self, store: Store) -> int:
        """How long a rank looks for another before it sleeps: hardly, if they need each other's cores."""
        own = ",".join(map(str, os.sched_getaffinity(0)))
        told = exchange(store, "cores", self.rank, self.world_size, own, self._timeout)
        cores = {core for text in told for core in text.split(",")}
        return 50_000 if len(cores) >= self.world_size else 2_000

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return len(self._peers)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        dtype = _code(tensor, "all_reduce")
        own = tensor.contiguous()
        self._call("all_reduce", own.data_ptr(), own.numel(), dtype)
        return own

    def reduce_scatter(self, tensor: Tensor, dim: int = -1) -> Tensor:
        dim = normal_dim(tensor, dim, "reduce_scatter", parts=self.world_size)
        dtype = _code(tensor, "reduce_scatter")
        parts = tensor.chunk(self.world_size, dim)
        pieces = tensor.contiguous() if dim == 0 else torch.stack(parts)
        result = torch.empty(parts[0].shape, dtype=tensor.dtype)
        self._call("reduce_scatter", pieces.data_ptr(), result.data_ptr(), result.numel(), dtype)
        return result

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        dim = normal_dim(tensor, dim, "all_gather")
        own = on_cpu(tensor, "all_gather").contiguous()
        shape = list(own.shape)
        outer = 1
        for size in shape[:dim]:
            outer *= size
        shape[dim] *= self.world_size
        result = torch.empty(shape, dtype=own.dtype)
        inner = own.nbytes // outer if outer else 0
        self._call("all_gather", own.data_ptr(), result.data_ptr(), outer, inner)
        return result

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        check_source(source, self.world_size)
        own = on_cpu(tensor, "broadcast").contiguous()
        self._call("broadcast", own.data_ptr(), own.nbytes, source)
        return own

    def barrier(self) -> None:
        self._call("barrier")

    @contextmanager
    def recording(self, record: Callable[[Any, tuple[Any, ...]], None]) -> Iterator[None]:
        """See :meth:`headrace_core.graph.RecordsCalls.recording`. A barrier cannot be recorded."""
        self._record = record
        try:
            yield
        finally:
            self._record = None

    def close(self) -> None:
        if self._group is not None:
            self._library.hr_group_close(self._group)
        self._group = None

    def __del__(self) -> None:
        self.close()

    def _call(self, operation: str, *arguments: int) -> None:
        """Run one of the library's operations; or record it."""
        if self._group is None:
            raise GroupError(f"{operation}: rank {self.rank} has left the group")
        name = f"hr_group_{operation}"
        if self._record is None:
            self._check(operation, getattr(self._library, name)(self._group, *arguments))
        elif operation == "barrier":
            raise CaptureRefused("a barrier between ranks")
        else:
            self._record(library.recorded(name), (self._group, *arguments))

    def _check(self, operation: str, status: int) -> None:
        if status != library.OK:
            raise self._error(operation, status)

    def _error(self, operation: str, status: int) -> GroupError:
        rank = self._library.hr_group_culprit(self._group)
        match status:
            case library.DIED:
                pid = self._peers[rank].pid
                return PeerLost(f"{operation}: rank {rank} (pid {pid}) has died", rank=rank)
            case library.LEFT:
                return PeerLost(f"{operation}: rank {rank} has left the group", rank=rank)
            case library.FAILED:
                return PeerLost(f"{operation}: rank {rank} gave up after an error", rank=rank)
            case library.TIMED_OUT:
                return PeerTimeout(
                    f"{operation}: rank {rank} did not come within {self._timeout:g} s", rank=rank
                )
            case library.MISMATCH:
                calls = [
                    f"rank {r} called {_told(self._library.hr_group_call_of(self._group, r))}"
                    for r in (self.rank, rank)
                ]
                return CallMismatch(f"ranks disagree: {', '.join(calls)}")
        raise AssertionError(f"{operation}: status {status}")


def _told(call: int) -> str:
    """A call in words, from its bits (native/src/group.cpp)."""
    name, detail, size = call >> 56, call >> 48 & 0xFF, call & 0xFFFFFFFFFFFF
    operation = _CALLS[name] if name < len(_CALLS) else f"operation {name}"
    match operation:
        case "all_reduce" | "reduce_scatter":
            dtype = next((known for known, code in library.DTYPES.items() if code == detail), "?")
            unit = "bytes" if operation == "all_reduce" else "elements a rank"
            return f"{operation} of {size} {unit}, {dtype}"
        case "all_gather":
            return f"{operation} of {size} bytes"
        case "broadcast":
            return f"{operation} of {size} bytes from rank {detail}"
    return operation


def _code(tensor: Tensor, operation: str) -> int:
    name = str(on_cpu(tensor, operation).dtype).removeprefix("torch.")
    if name not in library.DTYPES:
        raise ValueError(
            f"{operation}: tensors of {name} cannot be added up; must be one of "
            f"{', '.join(library.DTYPES)}"
        )
    return library.DTYPES[name]
