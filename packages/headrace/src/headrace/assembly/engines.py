"""Several engines behind one front end (``data_parallel_size``): their settings, and their shares of the
machine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from headrace.assembly.core import CORE_FACTORY
from headrace_core.errors import ConfigError
from headrace_core.platform import BringsWorker, Platform
from headrace_engine.config import CacheConfig, DeviceConfig, EngineConfig
from headrace_engine.cores import CpuThreads, format_cores, most_threads, plan_threads

if TYPE_CHECKING:
    from headrace_engine.clients.replicas import ReplicatedClient
    from headrace_engine.startup import StartupTimeline

FIELD = "parallel.data_parallel_size"


def replicated_client(
    config: EngineConfig, platform: Platform, timeline: StartupTimeline, *, follows_prefixes: bool
) -> ReplicatedClient:
    """The way to several engines, each a process, none of which is started yet.

    Args:
        config: as another process can read it.
        follows_prefixes: engines keep the blocks of prompts that have ended.

    Raises:
        ConfigError: a setting does not work with several engines.
    """
    from headrace_engine.clients.process import ProcessClient
    from headrace_engine.clients.replicas import ReplicatedClient

    check_engines(config, platform)
    shares = engine_shares(config, platform)
    if config.parallel.shares_experts:
        from headrace_engine.clients.grouped import GroupedClient

        return GroupedClient(
            lambda index, place: ProcessClient(CORE_FACTORY, shares[index], place=place),
            len(shares),
            timeline,
            follows_prefixes=follows_prefixes,
        )
    return ReplicatedClient(
        lambda index: ProcessClient(CORE_FACTORY, shares[index]),
        len(shares),
        timeline,
        follows_prefixes=follows_prefixes,
    )


def check_engines(config: EngineConfig, platform: Platform) -> None:
    """Refuse what does not work with several engines.

    Raises:
        ConfigError: naming the setting.
    """
    count = config.parallel.data_parallel_size
    if platform.device != "cpu" and not isinstance(platform, BringsWorker):
        raise ConfigError(
            f"{FIELD} = {count}: must be 1 on device {platform.device!r}: engines share a CPU for now; "
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
            raise ConfigError(
                f"{field}: must be left out with {FIELD} = {count}: {why}", field=field
            )


def check_one_engine(config: EngineConfig, other: str) -> None:
    """Refuse several engines together with another setting.

    Args:
        other: the setting with its value.

    Raises:
        ConfigError: there are several.
    """
    count = config.parallel.data_parallel_size
    if count > 1:
        raise ConfigError(
            f"{FIELD} = {count}: must be 1 with {other}: the engines are one process's, which "
            "chooses among them",
            field=FIELD,
        )


def engine_shares(config: EngineConfig, platform: Platform) -> list[EngineConfig]:
    """Each engine's configuration: the same model, its part of threads, cores and memory.

    Raises:
        ConfigError: threads are bound to fewer cores than there are engines.
    """
    count = config.parallel.data_parallel_size
    # Engines that share experts know how many they are.
    own = count if config.parallel.shares_experts else 1
    parallel = dataclasses.replace(config.parallel, data_parallel_size=own)
    alone = dataclasses.replace(config, parallel=parallel)
    if isinstance(platform, BringsWorker):  # neither threads nor memory of this machine
        return [alone] * count
    whole = plan_threads(config.device.num_threads, config.device.cpu_bind, default=most_threads())
    if whole.cores and len(whole.cores) < count:
        raise ConfigError(
            f"device.cpu_bind = {config.device.cpu_bind!r}: must have at least {count} cores, one for each "
            f"engine ({FIELD}), not {len(whole.cores)}",
            field="device.cpu_bind",
        )
    cache = cache_share(config.cache, count)
    return [
        dataclasses.replace(alone, cache=cache, device=_device_share(config.device, whole, index, count))
        for index in range(count)
    ]  # fmt: skip


def _device_share(device: DeviceConfig, whole: CpuThreads, index: int, count: int) -> DeviceConfig:
    num_threads = max(1, whole.num_threads // count)
    cores = whole.cores[index * num_threads : (index + 1) * num_threads]
    cpu_bind = format_cores(cores) if cores else "none"
    return dataclasses.replace(device, num_threads=num_threads, cpu_bind=cpu_bind)


def cache_share(cache: CacheConfig, count: int) -> CacheConfig:
    """Limits of the whole divided; a cache's own size stays each engine's."""
    most = cache.max_memory_bytes
    return dataclasses.replace(
        cache,
        gpu_memory_utilization=cache.gpu_memory_utilization / count,
        max_memory_bytes=None if most is None else most // count,
    )
