"""Communicator over TCP, by torch's gloo: for ranks on any hosts, and where there is nothing faster.

A group of its own on a store of its own: torch's global process group is neither needed nor touched. gloo's
own all-reduce adds a tensor's pieces in different orders of ranks, depending on where in the tensor they
lie, and rounds each partial sum to the tensor's dtype. Sums here are taken in the order of ranks, in
float32, and rounded once; so gloo only moves bytes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from headrace_core.parallel import Communicator
from headrace_distributed.arguments import check_ranks, check_source, normal_dim, on_cpu
from headrace_distributed.errors import GroupError, PeerLost, PeerTimeout
from headrace_distributed.peers import PeerWatch, introduce
from headrace_distributed.rendezvous import DEFAULT_TIMEOUT, connect, parse_address

SMALL = 64 << 10
"""Bytes of a tensor up to which every rank gets all tensors and adds them: one exchange instead of two."""


def create(
    rank: int, world_size: int, rendezvous: str, *, timeout: float = DEFAULT_TIMEOUT
) -> Communicator:
    """Join a group; returns when all ranks have joined.

    Args:
        rank: of this process, 0-based.
        world_size: number of ranks.
        rendezvous: ``tcp://HOST:PORT/NAME``, the same for all ranks.
        timeout: seconds to wait for another rank, here and in every operation.

    Raises:
        ConfigError: ``rank`` is not below ``world_size``, or the address cannot be read.
        PeerTimeout: a rank has not joined in time; names it.
    """
    check_ranks(rank, world_size)
    store = connect(rendezvous, timeout)
    return Gloo(rank, world_size, store, parse_address(rendezvous).host, timeout)


class Gloo(Communicator):
    """Ranks that talk over TCP; see :func:`create`."""

    def __init__(self, rank: int, world_size: int, store: Store, host: str, timeout: float) -> None:
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self._watch = PeerWatch(introduce(store, rank, world_size, timeout))
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout)
        options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(host))]
        self._group: ProcessGroupGloo | None = None
        self._run("joining", lambda: self._join(store, options))

    def _join(self, store: Store, options: Any) -> None:
        self._group = ProcessGroupGloo(store, self._rank, self._world_size, options)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        flat = on_cpu(tensor, "all_reduce").contiguous().view(-1)
        if flat.numel() == 0:
            return tensor
        if flat.nbytes <= SMALL:
            return sum_in_order(self._gathered(flat, "all_reduce")).view(tensor.shape)
        part = -(-flat.numel() // self.world_size)
        padded = torch.nn.functional.pad(flat, (0, part * self.world_size - flat.numel()))
        own = sum_in_order(self._exchanged(padded, "all_reduce"))
        return self._gathered(own, "all_reduce").view(-1)[: flat.numel()].view(tensor.shape)

    def reduce_scatter(self, tensor: Tensor, dim: int = -1) -> Tensor:
        dim = normal_dim(tensor, dim, "reduce_scatter", parts=self.world_size)
        shape = list(tensor.shape)
        shape[dim] //= self.world_size
        if tensor.numel() == 0:
            return tensor.new_empty(shape)
        pieces = torch.stack(on_cpu(tensor, "reduce_scatter").chunk(self.world_size, dim))
        return sum_in_order(self._exchanged(pieces.view(-1), "reduce_scatter")).view(shape)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        dim = normal_dim(tensor, dim, "all_gather")
        flat = on_cpu(tensor, "all_gather").contiguous().view(-1)
        found = self._gathered(flat, "all_gather").view(self.world_size, *tensor.shape)
        return torch.cat(found.unbind(), dim)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        check_source(source, self.world_size)
        flat = on_cpu(tensor, "broadcast").contiguous().view(-1)
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        if flat.numel():
            self._wait("broadcast", lambda group: group.broadcast([_bytes(flat)], options))
        return flat.view(tensor.shape)

    def barrier(self) -> None:
        self._wait("barrier", lambda group: group.barrier())

    def close(self) -> None:
        self._group = None
        self._watch.close()

    def _gathered(self, flat: Tensor, operation: str) -> Tensor:
        """[world_size, n] of every rank's [n]."""
        found = flat.new_empty(self.world_size, flat.numel())
        if flat.numel():
            self._wait(
                operation,
                lambda group: group._allgather_base(_bytes(found.view(-1)), _bytes(flat)),
            )
        return found

    def _exchanged(self, flat: Tensor, operation: str) -> Tensor:
        """[world_size, n]: what each rank has for this one in its [world_size * n]."""
        found = torch.empty_like(flat)
        self._wait(
            operation, lambda group: group.alltoall_base(_bytes(found), _bytes(flat), [], [])
        )
        return found.view(self.world_size, -1)

    def _wait(self, operation: str, begin: Callable[[Any], Any]) -> None:
        """Begin an operation of gloo's, and wait for its end."""
        group = self._group
        if group is None:
            raise GroupError(f"{operation}: rank {self.rank} has left the group")
        self._run(operation, lambda: begin(group).wait())

    def _run(self, operation: str, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            raise self._explained(operation, error) from error

    def _explained(self, operation: str, error: RuntimeError) -> GroupError:
        """Which rank is to blame for what gloo raised. Leaves the group, so that others notice at once."""
        self._group = None
        # A process's sockets are closed a little before its descriptor says that it has ended.
        timed_out = "imed out" in str(error)
        dead = self._watch.dead(0.0 if timed_out else 1.0)
        if dead:
            pid = self._watch.peers[dead[0]].pid
            return PeerLost(f"{operation}: rank {dead[0]} (pid {pid}) has died", rank=dead[0])
        if timed_out:
            return PeerTimeout(
                f"{operation}: a rank did not come within {self._timeout:g} s: {error}", rank=None
            )
        return PeerLost(f"{operation}: a rank has left the group: {error}", rank=None)


def sum_in_order(parts: Tensor) -> Tensor:
    """parts [world_size, n] added up, rank 0 first; floats of fewer than 32 bits in float32, rounded
    once."""
    wide = torch.float32 if parts.is_floating_point() and parts.itemsize < 4 else parts.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


def _bytes(flat: Tensor) -> Tensor:
    """The same memory as bytes: gloo knows no 1-byte floats, and needs to know no dtype."""
    return flat.view(torch.uint8)


def address_towards(host: str) -> str:
    """This machine's address, as that host sees it."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of datagrams: sends nothing
        name: str = probe.getsockname()[0]
    return name
