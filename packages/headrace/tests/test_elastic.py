"""Shares of the machine of engines that are added to a server, and how many it has room for."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest

from headrace import LLM, AsyncLLM, EngineArgs, SamplingParams
from headrace.assembly import engines
from headrace.assembly.engines import EngineShares
from headrace.assembly.parallel import room
from headrace.assembly.parallel.room import check_memory, resident_bytes
from headrace_core.errors import ConfigError, RequestError
from headrace_core.platform import CpuPlatform
from headrace_engine import cores
from headrace_engine.config import CacheConfig, DeviceConfig, EngineConfig
from headrace_engine.multiproc.config import ParallelConfig

GIB = 1 << 30


class Machine(CpuPlatform):
    """Eight cores and 32 GiB."""

    def available_memory(self) -> int:
        return 32 * GIB


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: tuple(range(8)))
    monkeypatch.setattr(cores, "cpu_quota", lambda: None)
    monkeypatch.setattr(room, "resident_bytes", lambda pid: pid * GIB)


def shares(count: int = 1, threads: int = 2, bind: str = "none", **cache: Any) -> EngineShares:
    config = EngineConfig(
        parallel=ParallelConfig(data_parallel_size=count, enable_elastic_ep=True),
        device=DeviceConfig(num_threads=threads, cpu_bind=bind),
        cache=CacheConfig(**cache),
    )
    return EngineShares(config, Machine())


def report(weights: int, cache: int, resident: int = 0) -> dict[str, Any]:
    return {"weights_bytes": weights * GIB, "activations_bytes": 0, "cache_bytes": cache * GIB,
            "pid": resident}  # fmt: skip


def test_an_engine_that_is_added_gets_as_much_as_one_of_the_start() -> None:
    found = shares(2, threads=4, bind="0-7", max_memory_bytes=20 * GIB)
    assert [found.of(index).device.num_threads for index in range(4)] == [2] * 4
    assert [found.of(index).device.cpu_bind for index in range(4)] == ["0-1", "2-3", "4-5", "6-7"]
    assert [found.of(index).cache.max_memory_bytes for index in range(3)] == [10 * GIB] * 3
    assert found.of(2).parallel.data_parallel_size == 1
    assert found.of(2).parallel.enable_elastic_ep is None


def test_a_share_of_the_free_memory_is_that_of_the_start() -> None:
    found = shares(2, gpu_memory_utilization=0.5)
    assert found.of(0).cache.max_memory_bytes is None
    assert found.of(2).cache.max_memory_bytes == 8 * GIB


def test_room_for_threads() -> None:
    found = shares(1, threads=3)
    found.check_room(2, [])
    with pytest.raises(RequestError, match=r"= 3: must be at most 2: .* 3, and there are 8 cores"):
        found.check_room(3, [])
    with pytest.raises(RequestError, match="must be at most 64") as refused:
        found.check_room(65, [])
    assert refused.value.param == "new_data_parallel_size"
    bound = shares(1, threads=1, bind="0-2")
    bound.check_room(3, [])
    with pytest.raises(RequestError, match=r"at most 3: .* there are 3 cores"):
        bound.check_room(4, [])


def test_room_for_memory() -> None:
    one = report(weights=2, cache=4, resident=3)  # will take 3 more
    check_memory(3, 1, [one], 15 * GIB)
    with pytest.raises(RequestError, match=r"= 4: must be at most 3: an engine takes 6\.00 GiB; 15\.00 GiB "
                       r"of memory are free, of which those that run will still take 3\.00 GiB"):  # fmt: skip
        check_memory(4, 1, [one], 15 * GIB)
    ranks = [report(1, 2, 3), report(1, 2, 3)]  # of one engine
    check_memory(2, 2, ranks, 6 * GIB)
    with pytest.raises(RequestError, match="must be at most 1"):
        check_memory(2, 2, ranks, 5 * GIB)
    with pytest.raises(RequestError, match="must be at most 1"):
        check_memory(2, 1, [report(weights=4, cache=0)], GIB)  # less than what was promised


def test_memory_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resident_bytes(os.getpid()) > 1 << 20
    assert resident_bytes(-1) == 0


@pytest.mark.parametrize(
    "more",
    [
        {"nnodes": 2, "tensor_parallel_size": 2},
        {"distributed_executor_backend": "external_launcher"},
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
    ],
)
def test_settings_that_cannot_be_combined(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="enable_elastic_ep = True: must be left out"):
        ParallelConfig(enable_elastic_ep=True, **more)


def test_one_front_end_only() -> None:
    config = EngineConfig(parallel=ParallelConfig(enable_elastic_ep=True))
    with pytest.raises(
        ConfigError, match=r"enable_elastic_ep = True: must be left out with api_server_count"
    ):
        engines.check_one_engine(config, "api_server_count above 1")
    events = dataclasses.replace(config.kv_events, enable_kv_cache_events=True)
    with pytest.raises(
        ConfigError, match=r"must be left out with parallel\.enable_elastic_ep = True"
    ):
        engines.check_engines(dataclasses.replace(config, kv_events=events), Machine())


def test_offline_the_number_is_fixed() -> None:
    with pytest.raises(ConfigError, match="must be left out for LLM"):
        LLM(device="sim", enable_elastic_ep=True)


async def test_async_llm_scales() -> None:
    engine = AsyncLLM.from_engine_args(EngineArgs(device="sim", enable_elastic_ep=True))
    try:
        assert await engine.scale_elastic_ep(2) == 0
        assert len((await engine.stats()).by_engine) == 2
        with pytest.raises(RequestError, match="must be at least 1"):
            await engine.scale_elastic_ep(0)
        for seconds in (-1, "soon", None, float("nan")):
            with pytest.raises(RequestError, match="drain_timeout"):
                await engine.scale_elastic_ep(1, seconds)
        outputs = [one async for one in engine.generate("a b", SamplingParams(max_tokens=3), "r")]
        assert len(outputs[-1].outputs[0].token_ids) == 3
        assert await engine.scale_elastic_ep(1, drain_timeout=5) == 0
    finally:
        await engine.shutdown()
