"""Several front ends of one core, over real sockets."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zmq
from engine_fakes import PATIENCE, CharTokenizer, ChildSteps, expected_tokens, served_model

from headrace_core.arrays import PackedArray
from headrace_core.config import LoadConfig
from headrace_core.errors import EngineDead
from headrace_core.multimodal import MediaInput, ProcessedMedia
from headrace_core.output import RequestOutput, StepTimes
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_engine.clients import front_ends as front_ends_module
from headrace_engine.clients.front_ends import FrontEnds
from headrace_engine.clients.joined import JoinedClient
from headrace_engine.clients.process import ProcessClient
from headrace_engine.clients.wire import PARENT, Add, Attach, BadFrame, Heartbeat, Outputs, Stop
from headrace_engine.config import EngineConfig
from headrace_engine.engine import Engine
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.messages import CoreOutput, CoreOutputs, TimedStep
from headrace_engine.shared_objects.items import SharedItem
from headrace_testing.waiting import until

FAKES = Path(__file__).parents[1] / "loop"
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


class Nobody:
    def on_outputs(self, outputs: CoreOutputs) -> None:
        raise AssertionError("outputs for nobody")

    def on_death(self, error: BaseException) -> None:
        pass


class Shared:
    """A core in a process of its own, and the front ends that were let in."""

    def __init__(self, folder: Path, steps: ChildSteps) -> None:
        self.folder, self.steps = folder, steps
        config = EngineConfig(load=LoadConfig(load_format="held"))
        self.core = ProcessClient("engine_fakes:core_factory", config, folder=folder)
        self.engines: list[Engine] = []

    async def add_front_end(self, name: str) -> tuple[JoinedClient, Engine]:
        client = JoinedClient(self.folder, name)
        making = asyncio.to_thread(Engine, client, InputProcessor(CharTokenizer(), served_model()))
        task = asyncio.create_task(making)
        self.core.add_front_end(name)
        engine = await task
        self.engines.append(engine)
        return client, engine


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir="/tmp", prefix="hr"))  # socket paths must be short
    yield made
    shutil.rmtree(made)


@pytest.fixture
async def shared(
    folder: Path, steps: ChildSteps, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Shared]:
    monkeypatch.setenv("PYTHONPATH", str(FAKES), prepend=os.pathsep)
    made = Shared(folder, steps)
    made.core.start(Nobody())
    yield made
    steps.open()
    for engine in made.engines:
        await engine.shutdown()
    made.core.shutdown()


async def collect(engine: Engine, prompt: str, params: SamplingParams, name: str) -> list[int]:
    outputs: list[RequestOutput] = [o async for o in engine.generate(prompt, params, name)]
    return list(outputs[-1].outputs[0].token_ids)


async def test_equal_ids_of_two_front_ends_never_meet(shared: Shared) -> None:
    _, one = await shared.add_front_end("one")
    _, two = await shared.add_front_end("two")
    params = SamplingParams(max_tokens=30)
    shared.steps.open()
    asked = [
        (prompt, asyncio.create_task(collect(engine, prompt, params, f"r{index}")))
        for index in range(8)
        for engine, prompt in ((one, f"1-{index}"), (two, f"2-{index}"))
    ]
    for prompt, task in asked:
        assert await task == expected_tokens(prompt, params)
    assert (await one.stats()).generation_tokens == (await two.stats()).generation_tokens > 0
    assert await two.reset_prefix_cache() is True


async def test_an_abort_reaches_only_ones_own(shared: Shared) -> None:
    _, one = await shared.add_front_end("one")
    _, two = await shared.add_front_end("two")
    kept = asyncio.create_task(collect(two, "kept", LONG, "same"))
    stream = one.generate("dropped", LONG, "same")
    begun = asyncio.create_task(anext(stream))
    await shared.steps.go_on_until(begun.done)
    await shared.steps.go_on_until_running(two, 2)
    await stream.aclose()
    await shared.steps.go_on_until_running(two, 1)
    shared.steps.open()
    assert await kept == expected_tokens("kept", LONG)


async def test_a_name_outlives_the_front_end_that_gave_it(shared: Shared) -> None:
    client, one = await shared.add_front_end("one")
    names = client.share_names()
    made = ProcessedMedia({"x": PackedArray("uint8", (2,), b"ab")}, 3, (7, 8, 7), ((1, 1),))
    names.offer("cat", "hash", made)
    media = MediaInput("image", dict(made.inputs), "hash", 3, 1, made.runs)
    request = CoreRequest("r", [1, 7, 8, 7], SamplingParams(), frozenset(), 1, 0.0, media=[media])
    client.add([request])
    await one.shutdown()
    shared.core.remove_front_end("one")
    client, _ = await shared.add_front_end("two")
    found = client.share_names()
    assert await asyncio.to_thread(found.find, "cat") == made
    assert await asyncio.to_thread(found.find, "dog") is None


@pytest.mark.req("REL-05")
async def test_what_a_front_end_leaves_behind_is_aborted(shared: Shared) -> None:
    gone, one = await shared.add_front_end("one")
    _, two = await shared.add_front_end("two")
    left = [asyncio.create_task(collect(one, "left", LONG, f"r{i}")) for i in range(5)]
    kept = asyncio.create_task(collect(two, "kept", LONG, "r0"))
    # All are sent before a step is made: none ends while another is on its way.
    await until(lambda: len(one._streams) == 5 and len(two._streams) == 1)
    await shared.steps.go_on_until_running(one, 6)
    gone.shutdown()  # as if killed: it says nothing
    shared.core.remove_front_end("one")
    await shared.steps.go_on_until_running(two, 1)
    shared.steps.open()
    assert await kept == expected_tokens("kept", LONG)
    stats = await two.stats()
    assert stats.num_free_blocks == stats.num_blocks
    for task in left:
        task.cancel()
    _, again = await shared.add_front_end("three")
    params = SamplingParams(max_tokens=9)
    assert await collect(again, "new", params, "r0") == expected_tokens("new", params)


async def test_one_hears_the_heartbeat_while_another_talks(shared: Shared) -> None:
    quiet, _ = await shared.add_front_end("quiet")
    _, busy = await shared.add_front_end("busy")
    heard = set()  # it is told nothing else

    async def hears() -> bool:
        await busy.stats()
        heard.add(quiet._heartbeat)
        return len(heard) == 4

    await until(hears)


@pytest.mark.req("REL-03")
async def test_the_cores_end_is_everybodys(shared: Shared) -> None:
    clients = [await shared.add_front_end(name) for name in ("one", "two")]
    streams = [asyncio.create_task(collect(engine, "x", LONG, "r")) for _, engine in clients]
    await shared.steps.go_on_until_running(clients[0][1], 2)
    assert shared.core.pid is not None
    os.kill(shared.core.pid, signal.SIGKILL)
    await until(lambda: shared.core.failure is not None)
    async with asyncio.timeout(PATIENCE):
        for client, _ in clients:
            client.core_ended("killed by signal 9")
        ended = await asyncio.gather(*streams, return_exceptions=True)
    assert all(isinstance(error, EngineDead) and "signal 9" in str(error) for error in ended)


async def test_a_core_that_dies_says_so_itself(shared: Shared) -> None:
    """To front ends that it has talked to before: a connection is nothing to make while dying."""
    _, one = await shared.add_front_end("one")
    _, two = await shared.add_front_end("two")
    steps = shared.steps
    first = asyncio.create_task(collect(one, "x", SamplingParams(max_tokens=1), "first"))
    await steps.go_on_until(first.done)
    waiting = two.generate("x", LONG, "r")
    begun = asyncio.create_task(anext(waiting))
    await steps.go_on_until(begun.done)
    fatal = SamplingParams(max_tokens=400, ignore_eos=True, extra_args={"die_at": 2})
    dying = asyncio.create_task(collect(one, "x", fatal, "r"))
    await steps.go_on_until(dying.done)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(EngineDead, match="died as told"):
            await dying
        with pytest.raises(EngineDead, match="died as told"):
            async for _ in waiting:
                pass


@pytest.mark.req("SEC-02")
async def test_only_the_parent_may_stop_the_core(shared: Shared) -> None:
    client, one = await shared.add_front_end("one")
    client._send(Stop())
    params = SamplingParams(max_tokens=9)
    shared.steps.open()
    assert await collect(one, "on", params, "r") == expected_tokens("on", params)


def test_one_that_takes_no_messages_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_ends_module, "HIGH_WATER_MARK", 10)
    context = zmq.Context()
    served = FrontEnds(context, str(folder))
    served.join("stuck")  # nobody ever binds its sockets
    try:
        for number in range(50):
            output = CoreOutput(f"stuck\x1fr{number}", new_token_ids=[1])
            served.on_outputs(CoreOutputs([output], 0.0))
        assert served.stuck() == ["stuck"]
        served.leave("stuck")
        assert served.stuck() == served.names == []
    finally:
        served.close()
        context.term()


def test_outputs_go_where_their_requests_came_from(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = zmq.Context()
    served = FrontEnds(context, str(folder))
    sent: list[tuple[str, list[str]]] = []
    timed: dict[str, TimedStep] = {}
    versions: dict[str, tuple[str, dict[str, list[str]] | None]] = {}
    tokens: dict[str, dict[str, int]] = {}

    def send(report: Outputs | Heartbeat, to: str = "parent") -> None:
        assert isinstance(report, Outputs)
        sent.append((to, [o.request_id for o in report.outputs.outputs]))
        if report.outputs.timed is not None:
            timed[to] = report.outputs.timed
        versions[to] = report.outputs.weights_version, report.outputs.earlier_versions
        tokens[to] = report.outputs.tokens

    monkeypatch.setattr(served, "send", send)
    try:
        outputs = ["a\x1fr1", "own", "b\x1fr1", "a\x1fx/y"]
        served.join("a")
        served.join("b")
        served.on_outputs(CoreOutputs([CoreOutput(name) for name in outputs], 0.0))
        assert sorted(sent) == [("a", ["r1", "x/y"]), ("b", ["r1"]), ("parent", ["own"])]
        assert timed == {}
        step = TimedStep(["a\x1fr1", "b\x1fr1", "b\x1fr2"], StepTimes(0.5))
        served.on_outputs(CoreOutputs([CoreOutput("a\x1fr1")], 0.0, step))
        assert timed == {
            "a": TimedStep(["r1"], StepTimes(0.5)),
            "b": TimedStep(["r1", "r2"], StepTimes(0.5)),
        }
        versions.clear()
        two = [CoreOutput("a\x1fr1"), CoreOutput("b\x1fr1")]
        served.on_outputs(CoreOutputs(two, 0.0, None, "2", {"a\x1fr1": ["1"]}))
        assert versions == {"a": ("2", {"r1": ["1"]}), "b": ("2", None)}
        tokens.clear()
        going_on = {"a\x1fr1": 5, "own": 6, "b\x1fr1": 7, "b\x1fr2": 8}
        served.on_outputs(CoreOutputs([], 0.0, tokens=going_on))
        assert tokens == {"a": {"r1": 5}, "parent": {"own": 6}, "b": {"r1": 7, "r2": 8}}
    finally:
        served.close()
        context.term()


def test_a_front_end_whose_memory_is_gone_is_given_up(folder: Path) -> None:
    context = zmq.Context()
    front_ends = FrontEnds(context, str(folder))
    try:
        front_ends.join("web")
        front_ends.attach("web", Attach(2**22 + 1, 3, 4096, 999))  # no process has that id
        assert front_ends.stuck() == ["web"]
        assert front_ends.entering("web", Add([], [SharedItem(0, 0, 0, 0)])) == []
        with pytest.raises(BadFrame, match="the parent process: its shared memory"):
            front_ends.attach(PARENT, Attach(2**22 + 1, 3, 4096, 999))
    finally:
        front_ends.close()
        context.destroy(linger=0)
