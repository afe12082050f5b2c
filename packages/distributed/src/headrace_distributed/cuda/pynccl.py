"""Communicator by NCCL's library itself (:mod:`headrace_distributed.cuda.libnccl`).

Operations are put on torch's current stream and nothing else happens: no other thread looks at events
meanwhile, as one of torch's process group does, so they can be part of a CUDA graph. The first operation
runs on a stream of the communicator's own while it joins: NCCL sets up its connections then, which a
recording could not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from headrace_core.parallel import Communicator
from headrace_distributed.arguments import normal_dim
from headrace_distributed.byte_mover import ByteMover
from headrace_distributed.cuda import settings
from headrace_distributed.cuda.arguments import can_be_added, on_device, pieces_of
from headrace_distributed.cuda.joining import GpuRanks, meet
from headrace_distributed.cuda.libnccl import DTYPES, SUM, NcclLibrary
from headrace_distributed.errors import GroupError
from headrace_distributed.rendezvous import DEFAULT_TIMEOUT, wait_for_value


def create(
    rank: int,
    world_size: int,
    rendezvous: str,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    device: torch.device | None = None,
    fixed_order: bool | None = None,
    library: str | None = None,
    stream: Callable[[], int] | None = None,
) -> Communicator:
    """Join a group; returns when all ranks have joined.

    Args:
        rank: of this process, 0-based.
        world_size: number of ranks.
        rendezvous: ``tcp://HOST:PORT/NAME``, the same for all ranks.
        timeout: seconds to wait for another rank to join. NCCL waits without an end for one that has died.
        device: where tensors lie; None: this process's current GPU.
        fixed_order: sums are taken in the order of ranks; None: :func:`settings.fixed_order`.
        library: path of NCCL's; None: it is looked for.
        stream: what operations are put on, as CUDA's handle; None: torch's current stream.

    Raises:
        ConfigError: there is no GPU, or two ranks are on one, or the address cannot be read.
        MissingDependency: NCCL was not found.
        PeerTimeout: a rank has not joined in time; names it.
        GroupError: NCCL could not join the ranks.
    """
    ranks = meet("pynccl", rank, world_size, rendezvous, device, timeout)
    return join(ranks, NcclLibrary(library), fixed_order=fixed_order, stream=stream)


def join(
    ranks: GpuRanks,
    nccl: NcclLibrary,
    *,
    fixed_order: bool | None = None,
    stream: Callable[[], int] | None = None,
) -> PyNccl:
    """The communicator of ranks that have met; see :func:`create`."""
    comm = nccl.join(_shared_id(nccl, ranks), ranks.rank, ranks.world_size)
    ordered = settings.fixed_order() if fixed_order is None else fixed_order
    return PyNccl(ranks, nccl, comm, fixed_order=ordered, stream=stream)


def _shared_id(nccl: NcclLibrary, ranks: GpuRanks) -> bytes:
    """NCCL's id, made by rank 0: 128 bytes that travel as hexadecimal digits."""
    if ranks.rank == 0:
        made = nccl.unique_id()
        ranks.store.set("nccl-id", made.hex())
        return made
    told = wait_for_value(ranks.store, "nccl-id", 0, ranks.world_size, ranks.timeout)
    return bytes.fromhex(told)


class PyNccl(ByteMover):
    """Ranks that talk by NCCL's library; see :func:`create`."""

    def __init__(
        self,
        ranks: GpuRanks,
        nccl: NcclLibrary,
        comm: int,
        *,
        fixed_order: bool,
        stream: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(ranks.rank, ranks.world_size)
        self._nccl = nccl
        self._comm: int | None = comm
        self.device = ranks.device
        """Where tensors lie."""
        self.fixed_order = fixed_order
        """Sums are taken in the order of ranks; False: in NCCL's."""
        self._stream = stream or (lambda: torch.cuda.current_stream(ranks.device).cuda_stream)
        with self._own_stream():
            self.barrier()

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Operations go to a stream that nothing else is on, and are done when this ends."""
        if self.device.type != "cuda":
            yield
            return
        own = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(own):
            yield
        own.synchronize()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        can_be_added(tensor, "all_reduce")
        if self.fixed_order:
            return super().all_reduce(tensor)
        own = self._accepted(tensor, "all_reduce").contiguous()
        result = torch.empty_like(own)
        if own.numel():
            self._call(
                "all_reduce", "ncclAllReduce", own.data_ptr(), result.data_ptr(), own.numel(),
                _code(own), SUM,
            )  # fmt: skip
        return result

    def reduce_scatter(self, tensor: Tensor, dim: int = -1) -> Tensor:
        can_be_added(tensor, "reduce_scatter")
        if self.fixed_order or not tensor.numel():
            return super().reduce_scatter(tensor, dim)
        dim = normal_dim(tensor, dim, "reduce_scatter", parts=self.world_size)
        pieces = pieces_of(self._accepted(tensor, "reduce_scatter"), dim, self.world_size)
        result = torch.empty_like(pieces[0])
        self._call(
            "reduce_scatter", "ncclReduceScatter", pieces.data_ptr(), result.data_ptr(), result.numel(),
            _code(result), SUM,
        )  # fmt: skip
        return result

    def barrier(self) -> None:
        own = torch.zeros(1, dtype=torch.uint8, device=self.device)
        found = own.new_empty(self.world_size)
        self._gather(found, own, "barrier")
        found.tolist()  # the host waits

    def check(self) -> None:
        """Look whether operations that had begun have failed, without waiting.

        Raises:
            GroupError: one has.
        """
        wrong = self._nccl.async_error(self._open("check"))
        if wrong:
            raise GroupError(wrong)

    def close(self) -> None:
        """Leave the group, with what is on the stream done."""
        comm, self._comm = self._comm, None
        if comm is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._nccl.call("ncclCommDestroy", comm)

    def abort(self) -> None:
        """Leave the group at once: what is on the streams of all ranks ends with an error."""
        comm, self._comm = self._comm, None
        if comm is not None:
            self._nccl.call("ncclCommAbort", comm)

    def _accepted(self, tensor: Tensor, operation: str) -> Tensor:
        return on_device(tensor, self.device, operation)

    def _gather(self, found: Tensor, flat: Tensor, operation: str) -> None:
        self._call(
            operation, "ncclAllGather", flat.data_ptr(), found.data_ptr(), flat.numel(), _code(flat)
        )

    def _spread(self, flat: Tensor, source: int, operation: str) -> None:
        self._call(
            operation, "ncclBroadcast", flat.data_ptr(), flat.data_ptr(), flat.numel(), _code(flat),
            source,
        )  # fmt: skip

    def _exchange(self, found: Tensor, flat: Tensor, operation: str) -> None:
        """Sends and receipts between two marks: NCCL runs them as one, so that no order can block."""
        size = flat.numel() // self.world_size
        mine = slice(self.rank * size, (self.rank + 1) * size)
        found[mine] = flat[mine]
        self._nccl.call("ncclGroupStart", operation=operation)
        try:
            for peer in range(self.world_size):
                if peer == self.rank:
                    continue
                start, code = peer * size, _code(flat)
                self._call(operation, "ncclSend", flat[start:].data_ptr(), size, code, peer)
                self._call(operation, "ncclRecv", found[start:].data_ptr(), size, code, peer)
        finally:
            self._nccl.call("ncclGroupEnd", operation=operation, comm=self._comm)

    def _open(self, operation: str) -> int:
        if self._comm is None:
            raise GroupError(f"{operation}: rank {self.rank} has left the group")
        return self._comm

    def _call(self, operation: str, name: str, *arguments: int) -> None:
        comm = self._open(operation)
        self._nccl.call(name, *arguments, comm, self._stream(), operation=operation, comm=comm)


def _code(tensor: Tensor) -> int:
    return DTYPES[str(tensor.dtype).removeprefix("torch.")]
