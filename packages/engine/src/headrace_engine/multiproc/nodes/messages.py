"""Messages between hosts beside those of ranks.

Each is one frame (:mod:`headrace_engine.multiproc.frames`).
"""

from __future__ import annotations

from typing import NamedTuple


class NodeJoins(NamedTuple):
    """First on a host's own connection: it would have ranks of this engine."""

    node: int
    num_nodes: int
    settings: dict[str, str]
    """What must be the same on all hosts, by name."""


class NodeAccepted(NamedTuple):
    """It has them, and opens a connection for each."""

    ranks: list[int]
    world_size: int
    communicator: str
    rendezvous: dict[str, str]
    """See :attr:`headrace_engine.multiproc.places.RankPlace.rendezvous`."""
    stages: int = 1
    """See :attr:`headrace_engine.multiproc.places.RankPlace.stages`."""


class NodeRefused(NamedTuple):
    """It has none, and why."""

    reason: str


class RankJoins(NamedTuple):
    """First on the connection of one rank."""

    node: int
    rank: int


class MirrorJoins(NamedTuple):
    """First on the connection over which a process gets what rank 0's engine puts out."""

    node: int


class NodeEnds(NamedTuple):
    """The side that says this ends its part of the engine, and so must the other."""

    reason: str
    """For people: the rank whose process ended, and how."""
