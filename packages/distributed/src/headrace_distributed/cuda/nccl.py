"""Communicator by torch's NCCL process group: ranks with a GPU each, on any hosts.

A group of its own on a store of its own, as gloo's. Operations are put on torch's current stream and return
before they are done; a rank that dies leaves the others' streams waiting until NCCL's timeout, so it is the
executor, which watches processes, that ends them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    AllreduceOptions,
    ReduceScatterOptions,
    Store,
)

from headrace_core.errors import MissingDependency
from headrace_core.parallel import Communicator
from headrace_distributed.arguments import normal_dim
from headrace_distributed.cuda import settings
from headrace_distributed.cuda.arguments import can_be_added, on_device, pieces_of
from headrace_distributed.cuda.joining import GpuRanks, meet
from headrace_distributed.errors import GroupError, PeerLost
from headrace_distributed.peers import PeerWatch
from headrace_distributed.process_group import ProcessGroupMover
from headrace_distributed.rendezvous import DEFAULT_TIMEOUT

GroupMaker = Callable[[Store, int, int, float], Any]
"""(store, rank, world_size, timeout in seconds) -> a process group of torch's."""


def create(
    rank: int,
    world_size: int,
    rendezvous: str,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    device: torch.device | None = None,
    fixed_order: bool | None = None,
    make_group: GroupMaker | None = None,
) -> Communicator:
    """Join a group; returns when all ranks have joined.

    Args:
        rank: of this process, 0-based.
        world_size: number of ranks.
        rendezvous: ``tcp://HOST:PORT/NAME``, the same for all ranks.
        timeout: seconds to wait for another rank, here and in every operation.
        device: where tensors lie; None: this process's current GPU.
        fixed_order: sums are taken in the order of ranks; None: :func:`settings.fixed_order`.
        make_group: None: torch's ``ProcessGroupNCCL``.

    Raises:
        ConfigError: there is no GPU, or two ranks are on one, or the address cannot be read.
        MissingDependency: torch was built without NCCL.
        PeerTimeout: a rank has not joined in time; names it.
    """
    ranks = meet("nccl", rank, world_size, rendezvous, device, timeout)
    return join(ranks, fixed_order=fixed_order, make_group=make_group)


def join(
    ranks: GpuRanks, *, fixed_order: bool | None = None, make_group: GroupMaker | None = None
) -> Nccl:
    """The communicator of ranks that have met; see :func:`create`."""
    make = nccl_group if make_group is None else make_group
    ordered = settings.fixed_order() if fixed_order is None else fixed_order
    group = make(ranks.store, ranks.rank, ranks.world_size, ranks.timeout)
    made = Nccl(ranks, group, fixed_order=ordered)
    made.barrier()  # NCCL sets up its connections at the first operation
    return made


def nccl_group(store: Store, rank: int, world_size: int, timeout: float) -> Any:
    """torch's process group over NCCL, registered nowhere.

    Raises:
        MissingDependency: torch was built without NCCL.
    """
    try:
        from torch.distributed import ProcessGroupNCCL  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        raise MissingDependency(
            "torch with NCCL",
            needed_for="communicator 'nccl'",
            install="pip install torch --index-url https://download.pytorch.org/whl/cu130",
        ) from None
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    return ProcessGroupNCCL(store, rank, world_size, options)


class Nccl(ProcessGroupMover):
    """Ranks that talk by torch's NCCL; see :func:`create`."""

    def __init__(self, ranks: GpuRanks, group: Any, *, fixed_order: bool) -> None:
        super().__init__(ranks.rank, ranks.world_size)
        self._group, self._watch = group, PeerWatch(ranks.peers)
        self.device = ranks.device
        """Where tensors lie."""
        self.fixed_order = fixed_order
        """Sums are taken in the order of ranks; False: in NCCL's, in the tensor's dtype."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        can_be_added(tensor, "all_reduce")
        if self.fixed_order:
            return super().all_reduce(tensor)
        own = self._accepted(tensor, "all_reduce").contiguous()
        if own.numel():
            # Options of sums: that is the default.
            self._operate("all_reduce", lambda group: group.allreduce([own], AllreduceOptions()))
        return own

    def reduce_scatter(self, tensor: Tensor, dim: int = -1) -> Tensor:
        can_be_added(tensor, "reduce_scatter")
        if self.fixed_order or not tensor.numel():
            return super().reduce_scatter(tensor, dim)
        dim = normal_dim(tensor, dim, "reduce_scatter", parts=self.world_size)
        pieces = pieces_of(self._accepted(tensor, "reduce_scatter"), dim, self.world_size)
        result = torch.empty_like(pieces[0])
        self._operate(
            "reduce_scatter",
            lambda group: group._reduce_scatter_base(
                result.view(-1), pieces.view(-1), ReduceScatterOptions()
            ),
        )
        return result

    def barrier(self) -> None:
        # NCCL's barrier is a sum, too; here the host waits for it.
        own = torch.zeros(1, device=self.device)
        self._operate("barrier", lambda group: group.allreduce([own], AllreduceOptions()))
        own.item()

    def close(self) -> None:
        self._group = None
        self._watch.close()

    def _accepted(self, tensor: Tensor, operation: str) -> Tensor:
        return on_device(tensor, self.device, operation)

    def _operate(self, operation: str, begin: Callable[[Any], Any]) -> None:
        """Put an operation on the stream; with NCCL ``wait`` has the current stream wait, not the host."""
        group = self._group
        if group is None:
            raise GroupError(f"{operation}: rank {self.rank} has left the group")
        try:
            begin(group).wait()
        except RuntimeError as error:
            self._group = None
            dead = self._watch.dead(1.0)
            if dead:
                pid = self._watch.peers[dead[0]].pid
                raise PeerLost(
                    f"{operation}: rank {dead[0]} (pid {pid}) has died", rank=dead[0]
                ) from error
            raise GroupError(f"{operation}: {error}") from error
