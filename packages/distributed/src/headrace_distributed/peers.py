"""Who the other ranks are, and which of them still live.

A process that is on the same host, and in the same namespace of process ids, is watched by a descriptor
(``pidfd_open``), which the kernel makes readable when the process ends, however it ends.
"""

from __future__ import annotations

import os
import platform
import select
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from headrace_distributed.rendezvous import exchange


@dataclass(frozen=True, slots=True)
class Peer:
    """One rank's process."""

    host: str
    """Equal for processes that see each other's ids."""
    pid: int


def introduce(store: Store, rank: int, world_size: int, timeout: float) -> tuple[Peer, ...]:
    """The processes of all ranks, by rank; waits for all of them.

    Raises:
        PeerTimeout: names the first rank that has not joined within ``timeout`` seconds.
    """
    told = exchange(store, "process", rank, world_size, f"{os.getpid()} {_host()}", timeout)
    pairs = (text.split(" ", 1) for text in told)
    return tuple(Peer(host, int(pid)) for pid, host in pairs)


def _host() -> str:
    """The running kernel and the namespace of process ids; a machine's name where there is neither."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def on_one_host(peers: Sequence[Peer]) -> bool:
    """True if all ranks' processes see each other."""
    return len({peer.host for peer in peers}) <= 1


class PeerWatch:
    """Descriptors of the peers' processes, where they can be had."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers = tuple(peers)
        own = _host()
        self.descriptors: list[int] = [
            _pidfd(peer.pid) if peer.host == own else -1 for peer in self.peers
        ]
        """By rank; -1 for a process that cannot be watched."""

    def dead(self, wait_seconds: float = 0.0) -> list[int]:
        """Ranks whose processes have ended; waits so long for the first."""
        poll, ranks = select.poll(), {}
        for rank, descriptor in enumerate(self.descriptors):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
                ranks[descriptor] = rank
        return sorted(ranks[descriptor] for descriptor, _ in poll.poll(1000 * wait_seconds))

    def close(self) -> None:
        """Watch no longer."""
        for descriptor in self.descriptors:
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptors = [-1] * len(self.peers)


def _pidfd(pid: int) -> int:
    """A descriptor of a process; -1 if the system has none, or the process has ended and was reaped."""
    if not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
