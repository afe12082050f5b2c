"""Places of ranks: what a rank must know to be built, and what builds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from headrace_core.executor import Worker
from headrace_engine.config import EngineConfig
from headrace_engine.lockstep.peers import PeerEngines
from headrace_engine.multiproc.leader import PassLeader
from headrace_engine.multiproc.nodes.plan import NodePlan


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank of an engine whose layers are divided over several."""

    rank: int = 0
    world_size: int = 1
    communicator: str = ""
    """Entry of ``headrace.communicators`` by which the ranks exchange tensors; "": there is one rank."""
    rendezvous: Mapping[str, str] = field(default_factory=dict)
    """By group: where its ranks find each other, in the communicator's own words."""
    stages: int = 1
    """Ranges of layers, each of as many neighbouring ranks."""
    num_here: int = 0
    """Ranks of this host, which are adjacent, each host having as many; 0: all are here."""
    engine: int = 0
    """Number of the engine, among those that share experts."""
    num_engines: int = 1
    """How many these are."""
    prefill_context: int = 1
    """Groups of neighbouring ranks that have the same weights and divide prompts."""

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
    groups: tuple[str, ...] = ("tp:0",)
    """Names of the groups that meet there."""
    stages: int = 1
    """See :attr:`RankPlace.stages`."""
    nodes: NodePlan | None = None
    """The hosts, if there are several."""
    peers: PeerEngines | None = None
    """Other engines with which this one shares experts; None: there are none."""
    prefill_context: int = 1
    """See :attr:`RankPlace.prefill_context`."""

    @property
    def num_here(self) -> int:
        """Ranks of rank 0's host; 0: all."""
        return 0 if self.nodes is None else self.world_size // self.nodes.count

    def __call__(self) -> Worker:
        """The worker of an engine with one rank."""
        return self.make(RankPlace(), None)

    def place(self, rank: int, rendezvous: Mapping[str, str]) -> RankPlace:
        """The place of a rank of rank 0's host."""
        engine, num_engines = (
            (0, 1) if self.peers is None else (self.peers.engine, self.peers.num_engines)
        )
        return RankPlace(
            rank, self.world_size, self.communicator, rendezvous, self.stages, self.num_here, engine,
            num_engines, self.prefill_context,
        )  # fmt: skip


class RankHello(msgspec.Struct, frozen=True):
    """What a rank's process is told first, as JSON."""

    factory: str
    config: EngineConfig
    place: RankPlace
    log_level: int
    log_json: bool = False
    log_colour: bool = False
    log_model: str = ""
