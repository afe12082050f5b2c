"""Processes that somebody else starts (``distributed_executor_backend="external_launcher"``): torchrun.

Every process runs the same script and makes the same ``LLM``. Neighbouring ranks share an engine:
tensor_parallel_size times pipeline_parallel_size of them. The lowest has it, the others mirror it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.assembly.core import build_resolved_core
from headrace.assembly.engines import cache_share
from headrace.assembly.hosts.nodes import shared_settings
from headrace.assembly.parallel.ranks import build_follower
from headrace_core.errors import ConfigError, EngineDead

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from headrace.assembly.resolved import ResolvedConfig
    from headrace_core.grammar import Vocabulary
    from headrace_engine.clients.base import CoreClient
    from headrace_engine.config import EngineConfig
    from headrace_engine.multiproc.nodes.joined import JoinedNode
    from headrace_engine.multiproc.nodes.joining import Joined
    from headrace_engine.multiproc.nodes.plan import NodePlan
    from headrace_engine.startup import StartupTimeline

BACKEND = "external_launcher"
FIELD = "parallel.distributed_executor_backend"


@dataclass(frozen=True, slots=True)
class LaunchedRank:
    """What torchrun tells a process by its environment."""

    rank: int
    world_size: int
    local_world_size: int
    """Processes of this host."""
    master_addr: str
    master_port: int
    has_store: bool = False
    """torchrun's own process serves the store at that address; else the process of rank 0 does."""
    attempt: str = "0"
    """Number of restarts of all processes."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> LaunchedRank:
        """Read RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        Raises:
            ConfigError: one is missing or is not a number; names it.
        """
        rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        local = _number(environ, "LOCAL_WORLD_SIZE", size)
        if not 0 <= rank < size:
            raise ConfigError(f"RANK = {rank}: must be in 0..{size - 1}, as WORLD_SIZE = {size}")
        return cls(
            rank, size, local, _text(environ, "MASTER_ADDR"), _number(environ, "MASTER_PORT"),
            environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )  # fmt: skip

    def spans_hosts(self, size: int) -> bool:
        """True if the engine of this rank, which has so many, has some on another host."""
        first = self.rank - self.rank % size
        return first // self.local_world_size != (first + size - 1) // self.local_world_size


def of_this_process(config: EngineConfig) -> EngineConfig:
    """The configuration of the engine of this process: its share of the host, and one engine.

    Raises:
        ConfigError: a setting does not fit the processes that were launched, or cannot be used with them.
    """
    parallel = config.parallel
    if parallel.distributed_executor_backend == "ray":
        return _of_ray(config)
    if parallel.distributed_executor_backend != BACKEND:
        return config
    launched = LaunchedRank.from_environment()
    size, engines = parallel.num_ranks, parallel.data_parallel_size
    wanted = size * engines
    if launched.world_size != wanted and (engines > 1 or launched.world_size % size):
        raise ConfigError(
            f"WORLD_SIZE = {launched.world_size}: must be {wanted} for {engines} engines of {size} ranks, or "
            f"a multiple of {size} with data_parallel_size left out: start so many processes (torchrun "
            "--nproc-per-node)",
            field="parallel.tensor_parallel_size",
        )
    spans, communicator = launched.spans_hosts(size), parallel.communicator
    for field, value, why in (
        ("engine_process", config.engine_process, "the engine is in the process of its rank 0"),
        ("device.cpu_bind", config.device.cpu_bind != "none",
         "each process would bind the same cores; start each with its own (taskset, numactl)"),
        ("parallel.communicator", spans and communicator == "shm", "the ranks are on several hosts"),
    ):  # fmt: skip
        if value:
            raise ConfigError(
                f"{field}: must be left out with {FIELD} = {BACKEND!r}: {why}", field=field
            )
    return dataclasses.replace(
        config,
        cache=cache_share(config.cache, launched.local_world_size),
        parallel=dataclasses.replace(
            parallel,
            data_parallel_size=1,
            communicator="gloo" if spans and communicator == "auto" else communicator,
        ),
    )


def _of_ray(config: EngineConfig) -> EngineConfig:
    """Each rank's share, as if all were on one host: where Ray puts them is not known yet."""
    if config.device.cpu_bind != "none":
        raise ConfigError(
            f"device.cpu_bind = {config.device.cpu_bind!r}: must be 'none' with {FIELD} = 'ray', which "
            "chooses hosts and cores",
            field="device.cpu_bind",
        )
    size, threads = config.parallel.num_ranks, config.device.num_threads
    device = dataclasses.replace(config.device, num_threads=threads and max(1, threads // size))
    return dataclasses.replace(config, cache=cache_share(config.cache, size), device=device)


def check_not_launched(config: EngineConfig) -> None:
    """Refuse the backend where requests come to one process only.

    Raises:
        ConfigError: as said.
    """
    if config.parallel.distributed_executor_backend == BACKEND:
        raise ConfigError(
            f"{FIELD} = {BACKEND!r}: must be 'mp', or left out: torchrun's processes run one script, which "
            "makes an LLM; a server starts its ranks itself",
            field=FIELD,
        )


def launched_client(
    config: EngineConfig,
    resolved: ResolvedConfig,
    timeline: StartupTimeline,
    vocabulary: Callable[[], Vocabulary] | None = None,
) -> CoreClient:
    """The way to the engine of this process's group: here, or in the process of the group's lowest rank.

    Args:
        config: of :func:`of_this_process`.

    Raises:
        ConfigError: torchrun's environment is not complete.
    """
    from headrace_engine.clients.inproc import InprocClient
    from headrace_engine.mirrored.following import FollowingClient
    from headrace_engine.mirrored.leading import LeadingClient

    size = config.parallel.num_ranks
    if size == 1:
        return InprocClient(
            lambda started: build_resolved_core(resolved, started, vocabulary), timeline
        )
    meeting = _Meeting(LaunchedRank.from_environment(), size, shared_settings(resolved))
    if meeting.node:
        return FollowingClient(meeting.join, partial(build_follower, config), timeline)

    def took(nodes: list[JoinedNode]) -> None:
        meeting.forget()
        client.take(nodes)

    inner = InprocClient(
        lambda started: build_resolved_core(resolved, started, vocabulary, meeting.lead(took)),
        timeline,
    )
    client = LeadingClient(inner)
    return client


class _Meeting:
    """How the processes of one engine find each other, through the store that torchrun has for them."""

    def __init__(self, launched: LaunchedRank, size: int, settings: dict[str, str]) -> None:
        self._launched, self._size, self._settings = launched, size, settings
        self._key = f"headrace/{launched.attempt}/{launched.rank // size}"
        self.node = launched.rank % size
        self._store: Store | None = None

    def lead(self, joined: Callable[[Any], None]) -> NodePlan:
        """Of rank 0: it says where it listens, and a secret that only those know who reach the store."""
        from headrace_engine.multiproc.nodes.plan import NodePlan

        secret = secrets.token_bytes(32)
        host = "127.0.0.1"
        if self._launched.spans_hosts(self._size):
            from headrace_distributed.gloo import address_towards

            host = address_towards(self._launched.master_addr)

        def opened(port: int) -> None:
            place = json.dumps({"host": host, "port": port, "secret": secret.hex()})
            self._connect().set(self._key, place)

        return NodePlan(
            self._size, host, 0, secret, self._settings, opened=opened, joined=joined, mirrored=True
        )

    def forget(self) -> None:
        """Of rank 0: the next engine of these processes meets anew."""
        self._connect().delete_key(self._key)

    def join(self) -> Joined:
        """Of the others."""
        from headrace_distributed.errors import GroupError
        from headrace_distributed.rendezvous import wait_for_value
        from headrace_engine.multiproc.nodes.joining import JOIN_SECONDS, join_rank_0
        from headrace_engine.multiproc.nodes.plan import NodePlan

        try:
            told = wait_for_value(self._connect(), self._key, 0, self._size, JOIN_SECONDS)
        except GroupError as error:
            raise EngineDead(f"rank 0 of this engine did not start: {error}") from error
        place = json.loads(told)
        secret = bytes.fromhex(place["secret"])
        return join_rank_0(
            NodePlan(
                self._size, place["host"], place["port"], secret, self._settings, self.node, mirrored=True
            )
        )  # fmt: skip

    def _connect(self) -> Store:
        if self._store is None:
            from headrace_distributed.launched import launched_store

            launched = self._launched
            self._store = launched_store(
                launched.master_addr,
                launched.master_port,
                launched.rank == 0 and not launched.has_store,
            )
        return self._store


def _text(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        raise ConfigError(
            f"{name}: is not set, and {FIELD} = {BACKEND!r} needs it; start the script with torchrun",
            field=FIELD,
        )
    return value


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and name not in environ:
        return default
    text = _text(environ, name)
    if not text.isdecimal():
        raise ConfigError(f"{name} = {text!r}: must be a number, as torchrun sets it", field=FIELD)
    return int(text)
