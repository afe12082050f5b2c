"""Places of ranks: what a rank must know to be built, and what builds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from headrace_core.executor import Worker
from headrace_engine.config import EngineConfig
from headrace_engine.multiproc.leader import PassLeader
from headrace_engine.multiproc.nodes.plan import NodePlan


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank of an engine whose layers are divided over several."""

    rank: int = 0
    world_size: int = 1
    communicator: str = ""
    """Entry of ``headrace.communicators`` by which the ranks exchange tensors; "": there is one rank."""
    rendezvous: str = ""
    """Where the communicator's ranks find each other, in its own words."""
    num_here: int = 0
    """Ranks of this host, which are adjacent, each host having as many; 0: all are here."""

    @property
    def size_here(self) -> int:
        """Ranks that share this host."""
        return self.num_here or self.world_size

    @property
    def rank_here(self) -> int:
        """The rank among those."""
        return self.rank % self.size_here


class Rendezvous(Protocol):
    """Where the ranks of a group find each other."""

    def address(self, name: str) -> str:
        """The address of the group of that name."""
        ...

    def give_up(self) -> None:
        """A rank has ended: tell those that wait for it, or will."""
        ...

    def close(self) -> None:
        """The ranks have met."""
        ...


@dataclass(frozen=True)
class RankedWorkers:
    """Makes the workers of an engine with several ranks; a :data:`headrace_core.executor.WorkerFactory` of
    an engine with one."""

    make: Callable[[RankPlace, PassLeader | None], Worker]
    """Rank 0's worker, given what leads the others."""
    factory: str
    """``module:function`` for the other ranks' processes: called with (config, place), returns a worker that
    also has ``run_pass``."""
    config: EngineConfig
    world_size: int = 1
    communicator: str = ""
    meet: Callable[..., Rendezvous] | None = None
    """Opens the place where the communicator's ranks meet, at an address if one is given; None: it needs
    none."""
    nodes: NodePlan | None = None
    """The hosts, if there are several."""

    @property
    def num_here(self) -> int:
        """Ranks of rank 0's host; 0: all."""
        return 0 if self.nodes is None else self.world_size // self.nodes.count

    def place(self, rank: int, rendezvous: str) -> RankPlace:
        """The place of a rank of rank 0's host."""
        return RankPlace(rank, self.world_size, self.communicator, rendezvous, self.num_here)

    def __call__(self) -> Worker:
        """The worker of an engine with one rank."""
        return self.make(RankPlace(), None)


class RankHello(msgspec.Struct, frozen=True):
    """What a rank's process is told first, as JSON."""

    factory: str
    config: EngineConfig
    place: RankPlace
    log_level: int
    log_json: bool = False
    log_colour: bool = False
    log_model: str = ""
