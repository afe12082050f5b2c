"""Several engines behind one front end (``data_parallel_size``): their settings, and their shares of the
machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.assembly.core import CORE_FACTORY
from headrace.assembly.parallel.room import check_memory, no_room
from headrace_core.errors import ConfigError
from headrace_core.platform import BringsWorker, Platform
from headrace_engine.config import CacheConfig, DeviceConfig, EngineConfig
from headrace_engine.cores import format_cores, most_threads, plan_threads
from headrace_engine.multiproc.config import MOST_ENGINES

if TYPE_CHECKING:
    from headrace_engine.clients.replicas import ReplicatedClient
    from headrace_engine.startup import StartupTimeline

FIELD = "parallel.data_parallel_size"


def replicated_client(
    config: EngineConfig, platform: Platform, timeline: StartupTimeline, *, follows_prefixes: bool
) -> ReplicatedClient:
    """The way to several engines, each a process, none of which is started yet; more may come later.

    Args:
        config: as another process can read it.
        follows_prefixes: engines keep the blocks of prompts that have ended.

    Raises:
        ConfigError: a setting does not work with several engines.
    """
    from headrace_engine.clients.process import ProcessClient
    from headrace_engine.clients.replicas import ReplicatedClient

    check_engines(config, platform)
    shares = EngineShares(config, platform)
    if config.parallel.shares_experts:
        from headrace_engine.clients.grouped import GroupedClient

        return GroupedClient(
            lambda index, place: ProcessClient(CORE_FACTORY, shares.of(index), place=place),
            config.parallel.num_engines_here,
            timeline,
            follows_prefixes=follows_prefixes,
        )
    return ReplicatedClient(
        lambda index: ProcessClient(CORE_FACTORY, shares.of(index)),
        config.parallel.num_engines_here,
        timeline,
        follows_prefixes=follows_prefixes,
        check_room=shares.check_room if config.parallel.is_elastic else None,
    )


def check_engines(config: EngineConfig, platform: Platform) -> None:
    """Refuse what does not work with several engines.

    Raises:
        ConfigError: naming the setting.
    """
    several = several_engines(config)
    if platform.device != "cpu" and not isinstance(platform, BringsWorker):
        raise ConfigError(
            f"{several}: must be left out on device {platform.device!r}: engines share a CPU for now; "
            "start a server for each device, and `headrace route` in front of them",
            field=FIELD,
        )
    multimodal = config.multimodal
    for field, value, why in (
        ("kv_events_config.enable_kv_cache_events", config.kv_events.enable_kv_cache_events,
         "events of several engines are not told apart yet"),
        ("cache.kv_transfer_config", bool(config.cache.kv_transfer_config),
         "a connector is one engine's"),
        ("multimodal.ec_transfer_config", multimodal.ec_transfer_config,
         "an encoder's vectors go to one engine"),
        ("multimodal.mm_processor_cache_type", multimodal.mm_processor_cache_type == "shm",
         "shared memory of media is one engine's"),
    ):  # fmt: skip
        if value:
            raise ConfigError(f"{field}: must be left out with {several}: {why}", field=field)


def check_one_engine(config: EngineConfig, other: str) -> None:
    """Refuse several engines together with another setting.

    Args:
        other: the setting with its value.

    Raises:
        ConfigError: there are several.
    """
    if config.parallel.is_replicated:
        wanted = "must be 1" if config.parallel.num_engines_here > 1 else "must be left out"
        raise ConfigError(
            f"{several_engines(config)}: {wanted} with {other}: the engines are one process's, which "
            "chooses among them",
            field=FIELD,
        )


def check_fixed_size(config: EngineConfig) -> None:
    """Refuse a setting for engines that come and go, where nobody could say when.

    Raises:
        ConfigError: it is there.
    """
    if config.parallel.enable_elastic_ep:
        raise ConfigError(
            "parallel.enable_elastic_ep = True: must be left out for LLM, whose number of engines is fixed; "
            "AsyncLLM.scale_elastic_ep and `headrace serve` change it",
            field="parallel.enable_elastic_ep",
        )


def several_engines(config: EngineConfig) -> str:
    """The setting by which there are several engines, or may be, with its value."""
    parallel = config.parallel
    if parallel.num_engines_here == 1:
        return "parallel.enable_elastic_ep = True"
    if parallel.data_parallel_start_rank is not None:
        return f"parallel.data_parallel_size_local = {parallel.data_parallel_size_local}"
    return f"{FIELD} = {parallel.data_parallel_size}"


class EngineShares:
    """Each engine's part of the machine. Those of the start have equal ones, of all that the settings allow;
    an engine that is added later gets as much as one of them.

    Args:
        config: of all engines together.

    Raises:
        ConfigError: threads are bound to fewer cores than there are engines.
    """

    def __init__(self, config: EngineConfig, platform: Platform) -> None:
        self._count = config.parallel.num_engines_here
        self._platform = platform
        # Engines that share experts know how many they are.
        own = self._count if config.parallel.shares_experts else 1
        alone = dataclasses.replace(
            config.parallel,
            data_parallel_size=own,
            data_parallel_size_local=None,
            data_parallel_start_rank=None,
            data_parallel_hybrid_lb=False,
            enable_elastic_ep=None,
        )
        self._alone = dataclasses.replace(config, parallel=alone)
        if isinstance(platform, BringsWorker):  # neither threads nor memory of this machine
            return
        device = config.device
        whole = plan_threads(device.num_threads, device.cpu_bind, default=most_threads())
        if whole.cores and len(whole.cores) < self._count:
            raise ConfigError(
                f"device.cpu_bind = {device.cpu_bind!r}: must have at least {self._count} cores, one for "
                f"each engine ({FIELD}), not {len(whole.cores)}",
                field="device.cpu_bind",
            )
        self._num_threads = max(1, whole.num_threads // self._count)
        self._cores = plan_threads(0, device.cpu_bind, default=most_threads()).cores
        """All that engines may be bound to, also those that are added; (): they are not bound."""
        self._cache = cache_share(config.cache, self._count)
        available = platform.available_memory()
        self._bytes = self._cache.max_memory_bytes or int(
            available * self._cache.gpu_memory_utilization
        )

    def of(self, index: int) -> EngineConfig:
        """The configuration of an engine: the same model, its threads, cores and memory."""
        if isinstance(self._platform, BringsWorker):
            return self._alone
        cache = self._cache
        if index >= self._count:  # a share of what is free now would be another
            cache = dataclasses.replace(cache, max_memory_bytes=self._bytes)
        return dataclasses.replace(self._alone, cache=cache, device=self._device(index))

    def _device(self, index: int) -> DeviceConfig:
        first = index * self._num_threads
        cores = self._cores[first : first + self._num_threads]
        cpu_bind = format_cores(cores) if cores else "none"
        return dataclasses.replace(
            self._alone.device, num_threads=self._num_threads, cpu_bind=cpu_bind
        )

    def check_room(self, num_engines: int, reports: Sequence[Mapping[str, Any]]) -> None:
        """Refuse more engines than the machine has room for.

        Args:
            num_engines: those that run, and those that are to come.
            reports: of the workers that run.

        Raises:
            RequestError: with the figures.
        """
        if num_engines > MOST_ENGINES:
            raise no_room(num_engines, MOST_ENGINES, "servers have no more engines than that")
        if isinstance(self._platform, BringsWorker):
            return
        places = len(self._cores) or most_threads()
        if num_engines * self._num_threads > places:
            raise no_room(
                num_engines, places // self._num_threads,
                f"each has as many threads as one of the start, {self._num_threads}, and there are {places} "
                "cores for them all; start with fewer threads (--num-threads)",
            )  # fmt: skip
        ranks = self._alone.parallel.num_ranks
        check_memory(num_engines, ranks, reports, self._platform.available_memory())


def cache_share(cache: CacheConfig, count: int) -> CacheConfig:
    """Limits of the whole divided; a cache's own size stays each engine's."""
    most = cache.max_memory_bytes
    return dataclasses.replace(
        cache,
        gpu_memory_utilization=cache.gpu_memory_utilization / count,
        max_memory_bytes=None if most is None else most // count,
    )
