"""What a host must know of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_engine.multiproc.nodes.joined import JoinedNode


@dataclass(frozen=True)
class NodePlan:
    """The hosts of an engine, each with as many ranks, in order: rank 0 is on node 0."""

    count: int
    host: str
    """At which rank 0's process listens."""
    port: int
    secret: bytes = field(repr=False)
    settings: Mapping[str, str]
    """Must be the same on all hosts, by name."""
    node: int = 0
    opened: Callable[[int], None] = lambda port: None
    """Is told the port at which rank 0 listens; for who joins without knowing it."""
    joined: Callable[[Sequence[JoinedNode]], None] = lambda nodes: None
    """Is told the nodes, once all have joined."""
    trouble: Callable[[], str | None] = lambda: None
    """Says why those that are missing will not come; None: they may."""
    mirrored: bool = False
    """Each node has a further connection, over which it gets the engine's outputs."""

    def ranks_of(self, node: int, world_size: int) -> range:
        """Ranks of a node."""
        here = world_size // self.count
        return range(node * here, (node + 1) * here)


def difference(ours: Mapping[str, str], theirs: Mapping[str, str], node: int) -> str | None:
    """The first settings in which a node differs from node 0, for people; None: in none. What one side has
    and the other has not follows from a setting that differs, and is named only where none does."""
    differing = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    of_both = [name for name in differing if name in ours and name in theirs]
    named = [
        f"{name}: {ours.get(name, 'unknown')} on node 0, {theirs.get(name, 'unknown')} on node {node}"
        for name in of_both or differing
    ]
    if not named:
        return None
    more = f" (and {len(named) - 5} more)" if len(named) > 5 else ""
    return f"settings differ: {'; '.join(named[:5])}{more}; must be the same on all nodes"
