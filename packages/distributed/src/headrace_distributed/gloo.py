"""Communicator over TCP, by torch's gloo: for ranks on any hosts, and where there is nothing faster.

A group of its own on a store of its own: torch's global process group is neither needed nor touched. gloo's
own all-reduce adds a tensor's pieces in different orders of ranks, depending on where in the tensor they
lie, and rounds each partial sum to the tensor's dtype; so gloo only moves bytes
(:mod:`headrace_distributed.byte_mover`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from headrace_core.parallel import Communicator
from headrace_distributed.arguments import check_ranks, on_cpu
from headrace_distributed.errors import GroupError, PeerLost, PeerTimeout
from headrace_distributed.peers import PeerWatch, introduce
from headrace_distributed.process_group import ProcessGroupMover
from headrace_distributed.rendezvous import DEFAULT_TIMEOUT, connect, parse_address


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


class Gloo(ProcessGroupMover):
    """Ranks that talk over TCP; see :func:`create`."""

    def __init__(self, rank: int, world_size: int, store: Store, host: str, timeout: float) -> None:
        super().__init__(rank, world_size)
        self._timeout = timeout
        self._watch = PeerWatch(introduce(store, rank, world_size, timeout))
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout)
        options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(host))]
        self._group: ProcessGroupGloo | None = None
        self._run("joining", lambda: self._join(store, options))

    def _join(self, store: Store, options: Any) -> None:
        self._group = ProcessGroupGloo(store, self._rank, self._world_size, options)

    def barrier(self) -> None:
        self._operate("barrier", lambda group: group.barrier())

    def close(self) -> None:
        self._group = None
        self._watch.close()

    def _accepted(self, tensor: Tensor, operation: str) -> Tensor:
        return on_cpu(tensor, operation)

    def _operate(self, operation: str, begin: Callable[[Any], Any]) -> None:
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


def address_towards(host: str) -> str:
    """This machine's address, as that host sees it."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of datagrams: sends nothing
        name: str = probe.getsockname()[0]
    return name
