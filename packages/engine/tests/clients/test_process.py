"""A core in another process, over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_fakes import (
    PATIENCE,
    CharTokenizer,
    ChildSteps,
    expected_tokens,
    served_model,
    until_stats,
)

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import CapacityError, EngineDead, RequestError
from headrace_core.output import RequestOutput
from headrace_core.sampling.params import RequestOutputKind, SamplingParams
from headrace_engine.clients.process import ProcessClient
from headrace_engine.config import EngineConfig, SchedulerConfig
from headrace_engine.engine import Engine
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.offline import OfflineEngine
from headrace_testing.waiting import until, wait_until

FAKES = Path(__file__).parents[1] / "loop"
FACTORY = "engine_fakes:core_factory"


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Children find the fakes; sockets live where we can see that they are removed."""
    monkeypatch.setenv("PYTHONPATH", str(FAKES), prepend=os.pathsep)
    short = tempfile.mkdtemp(dir="/tmp", prefix="hr")  # socket paths must be short
    monkeypatch.setenv("TMPDIR", short)
    monkeypatch.setattr(tempfile, "tempdir", short)
    yield
    left = os.listdir(short)
    os.rmdir(short)
    assert left == []


def client(story: str = "auto", **scheduler: Any) -> ProcessClient:
    config = EngineConfig(
        model=ModelConfig(hf_overrides={"a": [1, 2.5, None]}, served_model_name=("x",)),
        load=LoadConfig(load_format=story),
        scheduler=SchedulerConfig(**scheduler),
    )
    return ProcessClient(FACTORY, config)


def engine(made: ProcessClient) -> Engine:
    return Engine(made, InputProcessor(CharTokenizer(), served_model()))


def gone(pid: int | None) -> bool:
    assert pid is not None
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


async def collect(engine: Engine, *args: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(*args)]


async def drain(stream: AsyncIterator[RequestOutput]) -> None:
    async for _ in stream:
        pass


async def test_the_version_of_weights_crosses() -> None:
    running = engine(client())
    outputs = await collect(running, "x", SamplingParams(max_tokens=3), "before")
    assert outputs[-1].weights_versions == ("0",)
    assert await running.collective_rpc("set_weights_version", args=["7"]) == []
    outputs = await collect(running, "x", SamplingParams(max_tokens=3), "after")
    assert outputs[-1].weights_versions == ("7",)
    assert (await running.stats()).weights_version == "7"
    with pytest.raises(RequestError, match="weights_version = ''"):
        await running.collective_rpc("set_weights_version", args=[""])
    await running.shutdown()


def test_config_crosses_as_json() -> None:
    config = client(max_num_seqs=7)._config
    again = msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig)
    assert again == config
    assert dataclasses.asdict(again) == dataclasses.asdict(config)


@pytest.mark.req("REL-15")
@pytest.mark.req("REL-04")
async def test_same_outputs_as_in_process_and_nothing_left() -> None:
    made = client()
    running = engine(made)
    assert made.memory_plan == "a plan"
    assert made.timeline.accounted > 0.95
    assert "load model" in made.timeline.seconds
    params = SamplingParams(
        max_tokens=40, output_kind=RequestOutputKind.DELTA, logprobs=2, prompt_logprobs=1,
        logit_bias={97: 1.5}, stop_token_ids=[5], seed=3, extra_args={"x": [1]},
    )  # fmt: skip
    results = await asyncio.gather(*(collect(running, f"p{i}", params, f"r{i}") for i in range(16)))
    for index, outputs in enumerate(results):
        tokens = [t for o in outputs for t in o.outputs[0].token_ids]
        assert tokens == expected_tokens(f"p{index}", params)
        assert sum(len(o.outputs[0].logprobs or ()) for o in outputs) == len(tokens)
        assert outputs[0].prompt_logprobs is not None
    stats = await running.stats()
    assert stats.num_requests_running == 0
    assert stats.num_free_blocks == stats.num_blocks
    assert await running.reset_prefix_cache() is True
    await running.check_health()
    pid = made.pid
    await running.shutdown()
    assert gone(pid)
    await running.shutdown()


@pytest.mark.req("REL-06")
async def test_a_reader_that_is_behind_suspends_its_request(steps: ChildSteps) -> None:
    running = engine(client("held"))
    params = SamplingParams(
        max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA, logprobs=1
    )
    stream = running.generate("slow", params, "slow")
    steps.release()
    outputs = [await anext(stream)]

    async def is_free() -> bool:
        stats = await running.stats()
        return stats.num_free_blocks == stats.num_blocks

    await steps.go_on_until(is_free)  # the core waits for this side before each step
    state = running._processor.get("slow")
    assert state is not None
    assert not state.finished
    steps.open()
    outputs += [output async for output in stream]
    tokens = [t for o in outputs for t in o.outputs[0].token_ids]
    assert tokens == expected_tokens("slow", params)
    await running.shutdown()


@pytest.mark.req("SEC-02")
async def test_sockets_are_private() -> None:
    made = client()
    running = engine(made)
    assert made._folder is not None
    assert made._folder.stat().st_mode & 0o777 == 0o700
    listening = subprocess.run(
        ["sh", "-c", f"ls -l /proc/{made.pid}/fd"], capture_output=True, text=True, check=True
    ).stdout
    assert "socket" in listening
    tcp = {line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]}
    assert not any(f"socket:[{inode}]" in listening for inode in tcp)
    await running.shutdown()


@pytest.mark.req("REL-03")
@pytest.mark.parametrize("how", ["kill", "exit", "error"])
async def test_death_of_the_child_ends_every_stream(how: str, steps: ChildSteps) -> None:
    made = client("held")
    running = engine(made)
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    streams = [asyncio.create_task(collect(running, f"s{i}", params, f"s{i}")) for i in range(4)]
    first = running.generate("first", params, "first")
    begun = asyncio.create_task(anext(first))
    await steps.go_on_until(begun.done)
    await steps.go_on_until_running(running, 5)
    if how == "kill":
        assert made.pid is not None
        os.kill(made.pid, signal.SIGKILL)
    else:
        args = {"exit_at" if how == "exit" else "die_at": 3}
        fatal = SamplingParams(max_tokens=400, ignore_eos=True, extra_args=args)
        streams.append(asyncio.create_task(collect(running, "fatal", fatal, "fatal")))
        await steps.go_on_until(streams[-1].done)
    async with asyncio.timeout(PATIENCE):
        ended = await asyncio.gather(*streams, return_exceptions=True)
        with pytest.raises(EngineDead):
            await drain(first)
    assert all(isinstance(e, EngineDead) for e in ended)
    expected = {"kill": "signal 9", "exit": "exit status 3", "error": "died as told"}[how]
    assert expected in str(running.dead_error)
    with pytest.raises(EngineDead):
        await running.check_health()
    with pytest.raises(EngineDead):
        await running.stats()
    with pytest.raises(EngineDead):
        await collect(running, "late", params, "late")
    await running.shutdown()
    assert gone(made.pid)


@pytest.mark.req("REL-11")
@pytest.mark.parametrize(
    ("story", "error", "message"),
    [
        ("capacity", CapacityError, "7 GiB of 3 GiB"),
        ("crash", EngineDead, "exit status 9"),
        ("bug", EngineDead, "KeyError: 'a bug'"),
    ],
)
def test_start_errors_reach_the_parent(story: str, error: type[Exception], message: str) -> None:
    made = client(story)
    with pytest.raises(error, match=message):
        engine(made)
    assert gone(made.pid)


async def test_dropped_consumers_free_everything(steps: ChildSteps) -> None:
    running = engine(client("held"))
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    for index in range(5):
        stream = running.generate(f"x{index}", params, f"r{index}")
        first = asyncio.create_task(anext(stream))
        await steps.go_on_until(first.done)
        await stream.aclose()
    await steps.go_on_until_running(running, 0)
    stats = await running.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.generation_tokens < 5 * 400, "they ended by themselves"
    await running.shutdown()


async def test_a_frozen_child_is_unhealthy() -> None:
    made = client()
    running = Engine(made, InputProcessor(CharTokenizer(), served_model()), heartbeat_limit=1.5)
    await until_health(running, healthy=True)
    assert made.pid is not None
    os.kill(made.pid, signal.SIGSTOP)
    assert "no progress" in await until_health(running, healthy=False)
    os.kill(made.pid, signal.SIGCONT)
    await until_health(running, healthy=True)
    await running.shutdown()


async def until_health(engine: Engine, *, healthy: bool) -> str:
    """Wait for it; returns what is wrong."""
    wrong = ""

    async def found() -> bool:
        nonlocal wrong
        wrong = ""
        try:
            await engine.check_health()
        except EngineDead as error:
            wrong = str(error)
        return healthy == (not wrong)

    await until(found)
    return wrong


@pytest.mark.req("REL-04")
async def test_a_terminals_interrupt_does_not_reach_the_child() -> None:
    """Not while it imports either: only this process decides when it ends."""
    made = client()
    running = engine(made)
    assert made.pid is not None
    assert os.getpgid(made.pid) == made.pid != os.getpgrp()
    await running.shutdown()


def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, time
            from headrace_engine.config import EngineConfig
            from headrace_engine.clients.process import ProcessClient
            class Sink:
                def on_outputs(self, outputs): pass
                def on_death(self, error): pass
            client = ProcessClient("engine_fakes:core_factory", EngineConfig())
            client.start(Sink())
            print(client.pid, flush=True)
            time.sleep(600)  # until it is killed
            """
        )
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not gone(child)
    parent.kill()
    parent.wait(PATIENCE)
    parent.stdout.close()
    wait_until(lambda: gone(child))
    # The fixture checks that the folder of sockets is gone too.
    wait_until(lambda: not os.listdir(tempfile.gettempdir()))


def test_offline_over_a_process() -> None:
    params = SamplingParams(max_tokens=20)
    with OfflineEngine(client(), InputProcessor(CharTokenizer(), served_model())) as offline:
        outputs = offline.run(["a", "b"], params)
    assert [o.outputs[0].token_ids for o in outputs] == [
        expected_tokens(p, params) for p in ("a", "b")
    ]


async def test_pause_and_calls_cross(steps: ChildSteps) -> None:
    running = engine(client(story="held"))
    try:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        asked = [asyncio.create_task(collect(running, "x", params, f"r{i}")) for i in range(3)]
        await steps.go_on_until_running(running, 3)

        async def call_workers() -> list[Any]:
            found = await running.collective_rpc("report")
            await running.start_profile()
            await running.stop_profile()
            return found

        called = asyncio.create_task(call_workers())
        await steps.go_on_until(called.done)
        assert await called == [{"rank": 0}]
        with pytest.raises(RequestError, match="must be one of"):
            await running.collective_rpc("close")
        pausing = asyncio.create_task(running.pause_generation())
        await steps.go_on_until(pausing.done)
        await pausing
        for outputs in await asyncio.gather(*asked):
            assert outputs[-1].outputs[0].finish_reason == "abort"
        stats = await running.stats()
        assert stats.num_free_blocks == stats.num_blocks
        held = asyncio.create_task(collect(running, "x", SamplingParams(max_tokens=3), "held"))
        await until_stats(running, lambda stats: stats.num_requests_waiting)
        assert not held.done()
        await running.resume_generation()
        steps.open()
        assert (await held)[-1].finished
    finally:
        await running.shutdown()
