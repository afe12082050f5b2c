"""Several cores in processes of their own behind one client."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import (
    PATIENCE,
    CharTokenizer,
    expected_tokens,
    served_model,
)

from headrace_core.config import LoadConfig
from headrace_core.engine import EngineStats
from headrace_core.errors import EngineDead, GenerateError, HeadraceError, UnsupportedFeature
from headrace_core.output import RequestOutput
from headrace_core.sampling.params import SamplingParams
from headrace_engine.clients import replica, replica_calls
from headrace_engine.clients.gathered import summed_stats
from headrace_engine.clients.process import ProcessClient
from headrace_engine.clients.replicas import ReplicatedClient
from headrace_engine.config import EngineConfig
from headrace_engine.engine import Engine
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.offline import OfflineEngine
from headrace_testing.waiting import until

FAKES = Path(__file__).parents[1] / "loop"
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Children find the fakes; sockets live where we can see that they are removed."""
    monkeypatch.setenv("PYTHONPATH", str(FAKES), prepend=os.pathsep)
    short = tempfile.mkdtemp(dir="/tmp", prefix="hr")  # socket paths must be short
    monkeypatch.setenv("TMPDIR", short)
    monkeypatch.setattr(tempfile, "tempdir", short)
    yield
    left = os.listdir(short)
    os.rmdir(short)
    assert left == []


def client(story: str = "auto", count: int = 2) -> ReplicatedClient:
    config = EngineConfig(load=LoadConfig(load_format=story))
    return ReplicatedClient(lambda _: ProcessClient("engine_fakes:core_factory", config), count)


def engine(made: ReplicatedClient) -> Engine:
    return Engine(made, InputProcessor(CharTokenizer(), served_model()))


async def collect(engine: Engine, *args: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(*args)]


async def test_requests_are_spread_and_outputs_are_those_of_one() -> None:
    made = client()
    running = engine(made)
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    results = await asyncio.gather(*(collect(running, f"p{i}", params, f"r{i}") for i in range(8)))
    for index, outputs in enumerate(results):
        assert list(outputs[-1].outputs[0].token_ids) == expected_tokens(f"p{index}", params)
    stats = await running.stats()
    each = [one.generation_tokens for one in stats.by_engine]
    assert stats.generation_tokens == sum(each) == 160
    assert min(each) >= 40
    assert made._group.placements.balancer.loads == [0, 0]
    assert await running.reset_prefix_cache() is True
    assert await running.collective_rpc("weights_version") == ["0", "0"]
    pids = made.pids
    assert len(set(pids)) == 2
    await running.shutdown()
    await running.shutdown()


async def test_an_abort_reaches_its_engine() -> None:
    made = client()
    running = engine(made)
    streams = [running.generate(f"s{i}", LONG, f"s{i}") for i in range(4)]
    for stream in streams:
        await anext(stream)
        await stream.aclose()

    async def is_idle() -> bool:
        stats = await running.stats()
        return not stats.num_requests_running and stats.num_free_blocks == stats.num_blocks

    await until(is_idle)
    assert made._group.placements.balancer.loads == [0, 0]
    await running.shutdown()


@pytest.mark.req("REL-03")
async def test_a_killed_engine_fails_its_own_requests_and_is_replaced() -> None:
    made = client()
    running = engine(made)
    pid = made.pids[1]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # so that its requests do not end before it does
    tasks = [asyncio.create_task(collect(running, f"s{i}", LONG, f"s{i}")) for i in range(4)]

    async def are_placed() -> bool:
        return made._group.placements.balancer.loads[1] > 0 and all(
            task.done() for task in tasks[:1]
        )

    await until(are_placed)
    lost = {key for key, placed in made._group.placements.requests.items() if placed.engine == 1}
    assert lost
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE):
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    failures = [error for error in ended if isinstance(error, BaseException)]
    assert len(failures) == len(lost) < 4
    for error in failures:
        assert isinstance(error, GenerateError)
        assert "engine 1: the engine process ended (killed by signal 9)" in str(error)
    assert running.dead_error is None
    await running.check_health()  # the others serve

    async def is_back() -> bool:
        return made.pids[1] is not None

    await until(is_back)
    assert made.pids[1] != pid
    params = SamplingParams(max_tokens=5)
    after = await asyncio.gather(*(collect(running, f"a{i}", params, f"a{i}") for i in range(4)))
    for index, outputs in enumerate(after):
        assert list(outputs[-1].outputs[0].token_ids) == expected_tokens(f"a{index}", params)
    assert all(one.generation_tokens for one in (await running.stats()).by_engine)
    await running.shutdown()


async def test_an_engine_with_changed_weights_is_not_replaced() -> None:
    made = client()
    running = engine(made)
    await running.collective_rpc("set_weights_version", args=["7"])
    pid = made.pids[0]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    async def is_down() -> bool:
        return made.pids[0] is None

    await until(is_down)
    with pytest.raises(EngineDead, match=r"engine 0: .*signal 9.*set_weights_version was called"):
        await running.check_health()
    outputs = await collect(running, "x", SamplingParams(max_tokens=3), "x")
    assert len(outputs[-1].outputs[0].token_ids) == 3
    stats = await running.stats()
    assert "signal 9" in stats.by_engine[0].ended
    with pytest.raises(GenerateError, match="must reach all engines: engine 0"):
        await running.collective_rpc("set_weights_version", args=["8"])
    pid = made.pids[1]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    async def is_dead() -> bool:
        return running.dead_error is not None

    await until(is_dead)
    assert "all engines have ended: engine 0: " in str(running.dead_error)
    with pytest.raises(EngineDead):
        await collect(running, "x", SamplingParams(max_tokens=3), "y")
    await running.shutdown()


async def test_an_engine_that_keeps_ending_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "MOST_FALLS", 1)
    made = client()
    running = engine(made)
    pid = made.pids[0]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    async def is_down() -> bool:
        return made.trouble(1e9) is not None

    await until(is_down)
    assert "it ended 1 times in 60 s" in str(made.trouble(1e9))
    await running.shutdown()


async def test_a_request_may_name_its_engine() -> None:
    made = client()
    running = engine(made)
    from headrace_core.context import ENGINE

    token = ENGINE.set(1)
    for index in range(3):
        await collect(running, "x", SamplingParams(max_tokens=4), f"r{index}")
    ENGINE.set(2)
    with pytest.raises(HeadraceError, match=r"data_parallel_rank = 2: must be in 0\.\.1"):
        await collect(running, "x", SamplingParams(max_tokens=4), "bad")
    ENGINE.reset(token)
    stats = await running.stats()
    assert [one.generation_tokens for one in stats.by_engine] == [0, 12]
    await running.shutdown()


async def test_weights_for_one_group_are_refused() -> None:
    running = engine(client())
    with pytest.raises(
        UnsupportedFeature, match=r"= 2: .*swap_weights unless engines share experts"
    ):
        await running.collective_rpc(next(iter(replica_calls.UPDATE_CALLS)))
    await running.shutdown()


def test_an_engine_that_cannot_start_ends_the_others() -> None:
    good = EngineConfig()

    def make(index: int) -> ProcessClient:
        factory = "engine_fakes:core_factory" if index == 0 else "engine_fakes:nothing_of_that_name"
        return ProcessClient(factory, good)

    made = ReplicatedClient(make, 2)
    with pytest.raises(HeadraceError, match="nothing_of_that_name"):
        engine(made)


def test_offline_calls_run_in_both() -> None:
    made = client()
    offline = OfflineEngine(made, InputProcessor(CharTokenizer(), served_model()))
    params = SamplingParams(max_tokens=6)
    done: list[int] = []
    outputs = offline.run(
        [f"p{i}" for i in range(8)], params, on_output=lambda i, _: done.append(i)
    )
    assert [list(o.outputs[0].token_ids) for o in outputs] == [
        expected_tokens(f"p{i}", params) for i in range(8)
    ]
    assert sorted(set(done)) == list(range(8))
    counts = [one.generation_tokens for one in offline.stats().by_engine]
    assert sum(counts) == 48
    assert min(counts) > 0  # how many exactly depends on how fast the first ones run
    offline.shutdown()


def test_sums() -> None:
    one = EngineStats(num_requests_running=2, kv_cache_usage=0.5, num_blocks=10, step_tokens=[3],
                      num_accepted_per_position=[2, 1], running_loras={"a": 1})  # fmt: skip
    two = EngineStats(num_requests_running=1, num_blocks=30, step_tokens=[4],
                      num_accepted_per_position=[1], running_loras={"a": 2, "b": 1})  # fmt: skip
    total = summed_stats([one, EngineStats(ended="gone"), two])
    assert total.num_requests_running == 3
    assert total.kv_cache_usage == 0.125
    assert total.step_tokens == [3, 4]
    assert total.num_accepted_per_position == [3, 1]
    assert total.running_loras == {"a": 3, "b": 1}
    assert [bool(stats.ended) for stats in total.by_engine] == [False, True, False]
