"""Engines that share experts end together."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_fakes import PATIENCE, CharTokenizer, expected_tokens, served_model

from headrace_core.config import LoadConfig
from headrace_core.errors import CapacityError, EngineDead, HeadraceError
from headrace_core.sampling.params import SamplingParams
from headrace_engine.clients.grouped import GroupedClient, _ended_first
from headrace_engine.clients.process import ProcessClient
from headrace_engine.config import EngineConfig
from headrace_engine.engine import Engine
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.offline import OfflineEngine
from headrace_testing.waiting import until

FAKES = Path(__file__).parents[1] / "loop"
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(FAKES), prepend=os.pathsep)
    short = tempfile.mkdtemp(dir="/tmp", prefix="hr")  # socket paths must be short
    monkeypatch.setenv("TMPDIR", short)
    monkeypatch.setattr(tempfile, "tempdir", short)
    yield
    left = os.listdir(short)
    os.rmdir(short)
    assert left == []


def client(factory: str = "engine_fakes:core_factory", story: str = "auto") -> GroupedClient:
    """The fakes' cores know nothing of places, and need not."""
    config = EngineConfig(load=LoadConfig(load_format=story))
    return GroupedClient(lambda _, place: ProcessClient(factory, config), 2)


def engine(made: GroupedClient) -> Engine:
    return Engine(made, InputProcessor(CharTokenizer(), served_model()))


async def collect(engine: Engine, *args: Any) -> list[Any]:
    return [output async for output in engine.generate(*args)]


@pytest.mark.req("REL-03")
async def test_the_end_of_one_is_the_end_of_all() -> None:
    made = client()
    running = engine(made)
    params = SamplingParams(max_tokens=5)
    before = await collect(running, "p", params, "before")
    assert list(before[-1].outputs[0].token_ids) == expected_tokens("p", params)
    pids = [pid for pid in made.pids if pid is not None]
    os.kill(pids[1], signal.SIGSTOP)
    tasks = [asyncio.create_task(collect(running, f"s{i}", LONG, f"s{i}")) for i in range(4)]

    async def are_placed() -> bool:
        return made._group.placements.balancer.loads[1] > 0

    await until(are_placed)
    os.kill(pids[1], signal.SIGKILL)
    async with asyncio.timeout(PATIENCE):
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    failures = [error for error in ended if isinstance(error, BaseException)]
    assert failures
    for error in failures:
        assert "engine 1: the engine process ended (killed by signal 9)" in str(error)

    async def is_dead() -> bool:
        return running.dead_error is not None

    await until(is_dead)
    assert "end together" in str(running.dead_error)
    with pytest.raises(EngineDead):
        await collect(running, "x", params, "x")
    await running.shutdown()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("others", "blamed"),
    [
        (["exit status 0"], 0),
        (["exit status 0", "exit status 0"], 0),
        (["killed by signal 9"], 1),
        (["exit status 0", "exit status 1"], 2),
    ],
    ids=str,
)
def test_an_engine_that_left_by_itself_is_not_the_cause(others: list[str], blamed: int) -> None:
    """A rank was killed: both of two engines miss it, and leave."""
    replicas: list[Any] = [
        SimpleNamespace(index=index, client=SimpleNamespace(how_ended=how))
        for index, how in enumerate([None, *others])
    ]
    error = EngineDead("rank 1 (process 7) ended: killed by signal 9")
    error.__cause__ = EngineDead("the same")
    group: Any = SimpleNamespace(replicas=replicas)
    first, told = _ended_first(group, replicas[0], error)
    assert first is replicas[blamed]
    assert told is error or others[blamed - 1] in str(told)


def test_one_that_cannot_start_ends_the_others() -> None:
    with pytest.raises(HeadraceError, match="nothing_of_that_name"):
        engine(client("engine_fakes:nothing_of_that_name"))


def test_a_refused_start_ends_quietly(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CapacityError, match="7 GiB"):
        engine(client(story="capacity"))
    assert [record.getMessage() for record in caplog.records if "engine" in record.name] == []


def test_no_call_of_all_engines_is_made_once_they_are_told_to_end() -> None:
    made = client()
    running = OfflineEngine(made, InputProcessor(CharTokenizer(), served_model()))
    running.shutdown()
    with pytest.raises(EngineDead, match="shut down"):
        made.call_workers("sleep", [1])
