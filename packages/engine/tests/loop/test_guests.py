"""Functions of callers inside an engine: they cannot end it, and they cannot wait for it."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from engine_fakes import (
    CharTokenizer,
    FakeExecutor,
    FakeWorker,
    core_factory,
    make_core,
    served_model,
)

from headrace_core.config import LoadConfig
from headrace_core.errors import EngineDead, EngineError, RequestError
from headrace_core.sampling.params import SamplingParams
from headrace_core.step import ScheduledStep, StepResult
from headrace_engine.clients.inproc import InprocClient
from headrace_engine.clients.process import ProcessClient
from headrace_engine.config import EngineConfig
from headrace_engine.core import EngineCore
from headrace_engine.engine import Engine
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.offline import OfflineEngine
from headrace_engine.startup import StartupTimeline
from headrace_testing.waiting import wait_until

LIMIT = 20.0
"""Seconds after which a hang is one."""
GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)


class Pair(FakeExecutor):
    """Two workers; functions run on both, one after the other."""

    def __init__(self) -> None:
        super().__init__(FakeWorker())
        self.second = FakeWorker()

    def call(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        results = super().call(method, *args)
        if isinstance(method, str):
            return [*results, getattr(self.second, method)(*args)]
        return [*results, self._pool.submit(method, self.second, *args).result(LIMIT)]


def offline(core: Callable[[], EngineCore]) -> OfflineEngine:
    return OfflineEngine(
        InprocClient(lambda _: core()), InputProcessor(CharTokenizer(), served_model())
    )


def pair() -> EngineCore:
    core = make_core()
    core.executor = Pair()
    return core


@pytest.fixture(params=[make_core, pair], ids=["one-worker", "two-workers"])
def engine(request: pytest.FixtureRequest) -> Any:
    with offline(request.param) as made:
        yield made


def leave(worker: Any, code: object = 3) -> None:
    sys.exit(code)  # type: ignore[arg-type]


def interrupt(worker: Any) -> None:
    raise KeyboardInterrupt


def test_a_function_that_exits_fails_alone(engine: OfflineEngine) -> None:
    keyed = functools.partial(leave, code="as told")
    for function, said in (
        (leave, r"collective_rpc: leave raised SystemExit\(3\)"),
        (keyed, r"collective_rpc: leave raised SystemExit\('as told'\)"),
        (interrupt, r"collective_rpc: interrupt raised KeyboardInterrupt\(\)"),
    ):
        with pytest.raises(EngineError, match=said) as caught:
            engine.collective_rpc(function, timeout=LIMIT)
        assert not isinstance(caught.value, EngineDead)
        assert isinstance(caught.value.__cause__, SystemExit | KeyboardInterrupt)
    with pytest.raises(EngineError, match=r"apply_model: leave raised SystemExit\(3\)"):
        engine.apply_model(leave, timeout=LIMIT)
    assert engine.run(["a"], GREEDY)[0].finished
    assert set(engine.collective_rpc(lambda worker: 7)) == {7}


def test_a_function_that_calls_its_engine_is_refused(engine: OfflineEngine) -> None:
    batches = [engine.start(["left"], GREEDY) for _ in range(2)]
    calls: list[Callable[[], Any]] = [
        lambda: engine.run(["a"], GREEDY),
        lambda: engine.start(["a"], GREEDY),
        lambda: engine.add_request("r", "a", GREEDY),
        lambda: batches.pop().wait(),
        engine.stats,
        engine.reset_prefix_cache,
        lambda: engine.collective_rpc("report"),
        lambda: engine.collective_rpc(lambda worker: 1),
        lambda: engine.apply_model(type),
        engine.shutdown,
    ]
    for index, call in enumerate(calls):

        def asks(worker: Any, call: Callable[[], Any] = call) -> None:
            call()

        with pytest.raises(EngineError, match=r"^collective_rpc: .*asks called the engine that"):
            engine.collective_rpc(asks, timeout=LIMIT)
        with pytest.raises(EngineError, match=r"^apply_model: .*asks called the engine that"):
            engine.apply_model(asks, timeout=LIMIT)
        assert engine.run(["a"], GREEDY)[0].finished, index
    assert not engine.has_unfinished_requests()


def test_a_step_that_calls_its_engine_fails_alone() -> None:
    """As a logits processor would that asks the engine for something."""
    engines: list[OfflineEngine] = []

    class Asking(FakeWorker):
        def execute(self, step: ScheduledStep) -> StepResult:
            if any(new.request.params.seed == 7 for new in step.new_requests):
                engines[0].run(["a"], GREEDY)
            return super().execute(step)

    core = make_core(overlapped=False)
    core.executor = FakeExecutor(Asking())
    with offline(lambda: core) as engine:
        engines.append(engine)
        asking = SamplingParams(max_tokens=5, ignore_eos=True, seed=7)
        [output] = engine.run(["b"], asking)
        assert output.outputs[0].finish_reason == "error"
        assert "called the engine that runs it" in (output.outputs[0].error or "")
        assert engine.run(["a"], GREEDY)[0].outputs[0].finish_reason == "length"


def test_a_function_may_call_another_engine(engine: OfflineEngine) -> None:
    with offline(make_core) as other:
        [text, *_] = engine.apply_model(lambda model: other.run(["a"], GREEDY)[0].prompt)
    assert text == "a"


def test_an_engine_forgotten_by_all_but_its_function_ends() -> None:
    """The function drops the last reference, in the thread for which the engine's end would wait."""
    client = InprocClient(lambda _: make_core())
    engine = OfflineEngine(client, InputProcessor(CharTokenizer(), served_model()))
    loop, begun, go_on = client._loop, threading.Event(), threading.Event()
    assert loop is not None
    kept: list[Any] = [engine, client]

    def forget(worker: Any) -> None:
        begun.set()
        assert go_on.wait(LIMIT)
        kept.clear()
        gc.collect()

    with pytest.raises(TimeoutError):
        engine.collective_rpc(forget, timeout=0.01)
    assert begun.wait(LIMIT)
    del engine, client
    go_on.set()
    wait_until(lambda: not loop.is_alive, LIMIT)


def waiting(worker: Any, released: threading.Event) -> None:
    """Answers once the test lets it."""
    assert released.wait(LIMIT)


def test_a_call_without_an_answer_says_which_and_how_long(engine: OfflineEngine) -> None:
    said = r"^{}: no answer from the workers in 0.01 s; the call goes on$"
    released = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=said.format("collective_rpc: waiting")):
            engine.collective_rpc(waiting, args=(released,), timeout=0.01)
        with pytest.raises(TimeoutError, match=said.format("collective_rpc: report")):
            engine.collective_rpc("report", timeout=0.01)  # behind the other
        with pytest.raises(TimeoutError, match=said.format("apply_model: type")):
            engine.apply_model(type, timeout=0.01)
    finally:
        released.set()
    assert set(map(str, engine.collective_rpc("report", timeout=LIMIT)))


def test_an_error_of_the_callers_function_stays_its_own(engine: OfflineEngine) -> None:
    def late(worker: Any) -> None:
        raise TimeoutError("of the caller's own")

    with pytest.raises(TimeoutError, match=r"^of the caller's own$"):
        engine.collective_rpc(late, timeout=LIMIT)


async def test_the_same_of_the_asynchronous_engine() -> None:
    released = threading.Event()
    client = InprocClient(lambda _: make_core())
    running = Engine(client, InputProcessor(CharTokenizer(), served_model()), EngineConfig())
    try:
        with pytest.raises(TimeoutError, match=r"^collective_rpc: waiting: no answer .* 0.01 s"):
            await running.run_on_workers(waiting, args=(released,), timeout=0.01)
        with pytest.raises(TimeoutError, match=r"^collective_rpc: report: no answer .* 0.01 s"):
            await running.collective_rpc("report", timeout=0.01)
    finally:
        released.set()
        await running.shutdown()


class Exiting(FakeWorker):
    def report(self) -> dict[str, Any]:
        raise SystemExit("as told")


def exiting(config: EngineConfig, timeline: StartupTimeline) -> EngineCore:
    """For a core in another process: its workers' ``report`` exits."""
    core = core_factory(config, timeline)
    core.executor = FakeExecutor(Exiting())
    return core


@pytest.mark.parametrize("where", ["thread", "process"])
def test_a_worker_s_method_that_exits_fails_alone(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(load=LoadConfig(load_format="auto"))
    client: Any = InprocClient(functools.partial(exiting, config))
    if where == "process":
        monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
        client = ProcessClient("test_guests:exiting", config)
    with OfflineEngine(client, InputProcessor(CharTokenizer(), served_model())) as engine:
        with pytest.raises(
            EngineError, match=r"collective_rpc: report raised SystemExit\('as told'"
        ):
            engine.collective_rpc("report", timeout=LIMIT)
        assert engine.run(["a"], GREEDY)[0].finished
        with pytest.raises(RequestError, match="must be one of"):
            engine.collective_rpc("close")


def test_a_call_that_ends_the_worker_is_told_and_ends_the_engine() -> None:
    core = make_core()

    def dies(method: object, *args: Any) -> list[Any]:
        core.executor._failure = SystemExit("as told")  # type: ignore[attr-defined]
        raise SystemExit("as told")

    with offline(lambda: core) as engine:
        core.executor.call = dies  # type: ignore[method-assign]
        with pytest.raises(EngineError, match=r"report raised SystemExit\('as told'\)"):
            engine.collective_rpc("report", timeout=LIMIT)
        with pytest.raises(EngineDead, match="as told"):
            engine.run(["a"], GREEDY)
