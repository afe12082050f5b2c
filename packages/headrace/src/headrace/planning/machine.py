"""A machine of CPU cores as the model of scaling sees it: nodes of memory, what cores read and multiply, what
a meeting of threads costs.

Sizes in bytes, speeds in bytes or operations (a multiplication and an addition are two) a second, times in
seconds. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from headrace_core.errors import ConfigError

MOST_NODES, MOST_CORES = 64, 1024


class Placement(Enum):
    """On which nodes the pages of weights lie that threads of several nodes read."""

    LOCAL = "local"
    """Each page on the node of the threads that read it: a rank, or an engine, on each node."""
    SPREAD = "spread"
    """On each node as many as it has of the threads: threads take panels as they come when they pack, and
    again when they read, so that a page is as likely on one thread's node as on another's."""
    FIRST_NODE = "first node"
    """All on the first node: one thread wrote them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Equal nodes of equal cores, each core with one thread of the engine at most."""

    nodes: int = 1
    """NUMA nodes; a socket has one or more."""
    cores: int
    """Cores of each node."""
    core_read: float
    """With which one core reads weights from its node's memory, by the kernel of a product with one row."""
    node_read: float
    """With which all cores of a node read its memory."""
    far_core_read: float = 0.0
    """With which one core reads another node's memory; 0: as its own node's."""
    link: float = math.inf
    """Into a node from all others together, and as much out of it at the same time."""
    core_products: float
    """Operations a second of one core, in products of hundreds of rows."""
    core_few_products: float = 0.0
    """Likewise, of 32 rows and fewer; 0: as many."""
    start: float = 2e-6
    """Seconds of a kernel's start on two threads of one node: the other begins, and is waited for."""
    line: float = 5e-8
    """For each further thread, and for each piece of work that a thread takes: the pool's counters are two
    cache lines, which one thread has at a time."""
    far_line: float = 2e-7
    """The same for a thread of another node than the first."""
    cache: int = 0
    """Bytes of a node's last-level cache."""
    core_cache_read: float = 0.0
    """With which one core reads weights that are in it; 0: as from memory."""
    panel: int = 64
    """Outputs of a weight that one thread multiplies at least: four vectors of the instruction set."""

    def __post_init__(self) -> None:
        for name, most in (("nodes", MOST_NODES), ("cores", MOST_CORES)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ConfigError(f"{name} = {value!r}: must be 1 to {most}", field=name)
        for name in ("core_read", "node_read", "core_products", "link", "panel"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name} = {value!r}: must be above 0", field=name)
        for name in ("far_core_read", "core_few_products", "start", "line", "far_line", "cache",
                     "core_cache_read"):  # fmt: skip
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} = {value!r}: must be at least 0", field=name)

    @property
    def all_cores(self) -> int:
        return self.nodes * self.cores

    def one_node(self) -> Machine:
        """One of its nodes."""
        return dataclasses.replace(self, nodes=1, link=math.inf)

    def threads_by_node(self, threads: int) -> tuple[int, ...]:
        """Threads of one process on each node that has some: nodes are filled one after the other.

        Raises:
            ConfigError: there are fewer cores.
        """
        if not 1 <= threads <= self.all_cores:
            raise ConfigError(
                f"threads = {threads}: must be 1 to {self.all_cores}, the number of cores",
                field="threads",
            )
        full, rest = divmod(threads, self.cores)
        return (self.cores,) * full + ((rest,) if rest else ())

    def meeting(self, by_node: Sequence[int]) -> float:
        """Seconds of a kernel's start and end among threads on nodes; 0 for one thread: it meets nobody."""
        threads = sum(by_node)
        if threads < 2:
            return 0.0
        far = threads - by_node[0]
        return self.start + self.line * (threads - 2 - far) + self.far_line * far

    def piece(self, by_node: Sequence[int]) -> float:
        """Seconds of taking one piece of work, while nobody else can take one."""
        if sum(by_node) < 2:
            return 0.0
        return self.far_line if len(by_node) > 1 else self.line

    def facts(self) -> dict[str, Any]:
        """Plain data; speeds without a bound are left out."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v != math.inf}


class Reading(NamedTuple):
    """How threads read some bytes."""

    seconds: float
    binds: str
    """``memory``, ``link`` or ``cores``."""


class _Limits(NamedTuple):
    """Bounds of the speed of all threads together. Bytes a second."""

    cores: float
    memory: float
    link: float = math.inf


def read_seconds(
    machine: Machine,
    num_bytes: float,
    by_node: Sequence[int],
    placement: Placement,
    *,
    pieces: float = math.inf,
    cached: bool = False,
) -> Reading:
    """Reading of weights whose pieces are handed out to threads as these come for them.

    Args:
        by_node: threads on each node.
        pieces: into which the bytes can be divided; no more threads than these take part.
        cached: the bytes are in the nodes' caches.
    """
    threads = sum(by_node)
    active = [count * min(1.0, pieces / threads) for count in by_node]
    # Part of the bytes that the thread with the most pieces reads.
    most = 1.0 / threads if math.isinf(pieces) else math.ceil(pieces / threads) / pieces
    if cached:
        return Reading(most * num_bytes / (machine.core_cache_read or machine.core_read), "cores")
    limits = _limits(machine, active, placement)
    alone = most * num_bytes * sum(active) / limits.cores
    together = num_bytes / min(limits.memory, limits.link)
    if alone >= together:
        return Reading(alone, "cores")
    return Reading(together, "memory" if limits.memory <= limits.link else "link")


def _limits(machine: Machine, active: Sequence[float], placement: Placement) -> _Limits:
    """Limits of threads that read, so many on each node."""
    near, far = machine.core_read, machine.far_core_read or machine.core_read
    shares = [count / sum(active) for count in active]
    match placement:
        case Placement.LOCAL:
            return _Limits(sum(active) * near, len(active) * machine.node_read)
        case Placement.FIRST_NODE:
            first, others = active[0] * near, sum(active[1:]) * far
            return _Limits(first + others, machine.node_read, first + machine.link)
        case Placement.SPREAD:
            # A core waits for one line after the other, near ones and far ones.
            rates = [1.0 / (share / near + (1.0 - share) / far) for share in shares]
            crossing = max(share * (1.0 - share) for share in shares)
            return _Limits(
                sum(count * rate for count, rate in zip(active, rates)),
                machine.node_read / max(shares),
                machine.link / crossing if crossing else math.inf,
            )


def parse_machine(facts: Mapping[str, Any], field: str = "machine") -> Machine:
    """A machine from plain data with :class:`Machine`'s names.

    Raises:
        ConfigError: an unknown or missing name, or a value that is no number.
    """
    known = {each.name: each for each in dataclasses.fields(Machine)}
    for name, value in facts.items():
        if name not in known:
            raise ConfigError(
                f"{field}: {name!r} is not a property of a machine; these are: {', '.join(known)}",
                field=field,
            )
        whole = known[name].type == "int"
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            kind = "a whole number" if whole else "a number"
            raise ConfigError(f"{field}: {name} = {value!r}: must be {kind}", field=field)
    missing = [
        name for name, each in known.items()
        if each.default is dataclasses.MISSING and name not in facts
    ]  # fmt: skip
    if missing:
        raise ConfigError(f"{field}: must also have {', '.join(missing)}", field=field)
    return Machine(**facts)
