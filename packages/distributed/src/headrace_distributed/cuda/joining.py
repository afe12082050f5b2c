"""How ranks on GPUs meet: who they are, and what each computes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from headrace_distributed.arguments import check_ranks
from headrace_distributed.cuda.devices import Gpu, describe, exchange_gpus, own_gpu
from headrace_distributed.peers import Peer, introduce
from headrace_distributed.rendezvous import connect, exchange


@dataclass(frozen=True, slots=True)
class GpuRanks:
    """Ranks that have met, as one of them sees them."""

    rank: int
    store: Store
    peers: Sequence[Peer]
    """By rank: their processes."""
    gpus: Sequence[Gpu]
    """By rank: their devices."""
    device: torch.device
    """This rank's."""
    timeout: float
    """Seconds to wait for another rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.peers)

    def told_by_all(self, key: str, value: str) -> tuple[str, ...]:
        """Each rank's value, by rank. A collective, with a key of its own.

        Raises:
            PeerTimeout: a rank has said nothing in time.
        """
        return exchange(self.store, key, self.rank, self.world_size, value, self.timeout)

    def agree(self, key: str, reason: str) -> str:
        """The first rank's reason against something, "": no rank has one. A collective.

        Raises:
            PeerTimeout: a rank has said nothing in time.
        """
        told = self.told_by_all(key, reason)
        found = [f"rank {rank}: {reason}" for rank, reason in enumerate(told) if reason]
        return found[0] if found else ""


def meet(
    communicator: str,
    rank: int,
    world_size: int,
    rendezvous: str,
    device: torch.device | None,
    timeout: float,
) -> GpuRanks:
    """Wait for all ranks of a group.

    Args:
        communicator: its name, for messages.
        device: where tensors lie; None: this process's current GPU.

    Raises:
        ConfigError: ``rank`` is none, there is no GPU, two ranks are on one, or the address cannot be read.
        PeerTimeout: a rank has not come in time; names it.
    """
    check_ranks(rank, world_size)
    device = own_gpu(communicator) if device is None else device
    store = connect(rendezvous, timeout)
    peers = introduce(store, rank, world_size, timeout)
    gpus = exchange_gpus(store, rank, world_size, describe(device), timeout)
    return GpuRanks(rank, store, peers, gpus, device, timeout)
