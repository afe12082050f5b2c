"""What steps take, told of each request: both loops, chunks, preemption, several completions."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from engine_fakes import CharTokenizer, FakeWorker, make_core, served_model

from headrace_core.errors import GenerateError
from headrace_core.executor import Worker
from headrace_core.output import RequestOutput, StepTimes
from headrace_core.sampling.params import RequestOutputKind, SamplingParams
from headrace_core.step import ScheduledStep, StepResult
from headrace_engine import step_timer
from headrace_engine.clients.inproc import InprocClient
from headrace_engine.config import ObservabilityConfig
from headrace_engine.core import EngineCore
from headrace_engine.engine import Engine
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.step_timer import StepTimer, TimedWorker, timed_workers

DELTA = RequestOutputKind.DELTA


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowWorker(FakeWorker):
    """Says that a pass took 1 s and a step 1.5 s; notes who was part of steps that did not raise."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[set[str]] = []

    def execute(self, step: ScheduledStep) -> StepResult:
        result = super().execute(step)
        self.steps.append({i.partition("#")[0] for i in step.num_scheduled_tokens})
        result.forward_seconds, result.execute_seconds = 1.0, 1.5
        return result


@pytest.fixture(params=[True, False], ids=["overlapped", "simple"])
def overlapped(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class Timed:
    """An engine whose steps are timed, and its worker."""

    def __init__(self, **settings: Any) -> None:
        self.timer = StepTimer(forward=True, execute=True)
        self.worker = SlowWorker()
        self.engine = Engine(
            InprocClient(lambda _: self._core(settings)),
            InputProcessor(CharTokenizer(), served_model()),
        )

    def _core(self, settings: dict[str, Any]) -> EngineCore:
        core = make_core(step_timer=self.timer, **settings)
        cast(Any, core.executor).worker = self.worker
        return core

    async def run(self, prompt: str, name: str, **params: Any) -> StepTimes:
        given = SamplingParams(ignore_eos=True, **params)
        outputs = [o async for o in self.engine.generate(prompt, given, name)]
        return times_of(outputs[-1])

    def num_steps(self, name: str) -> int:
        return Counter(i for step in self.worker.steps for i in step)[name]


def times_of(output: RequestOutput) -> StepTimes:
    assert output.metrics is not None
    assert output.metrics.step_times is not None
    return output.metrics.step_times


def test_the_scheduler_is_timed_step_by_step() -> None:
    clock = Clock()
    timer = StepTimer(forward=True, execute=False, clock=clock)
    steps = [ScheduledStep(0, {"a": 3}), ScheduledStep(1, {"a": 1, "b": 2})]

    def schedule(step: ScheduledStep | None, seconds: float) -> None:
        def work() -> ScheduledStep | None:
            clock.now += seconds
            return step

        assert timer.schedule(work) is step

    def update(*_: Any) -> list[Any]:
        clock.now += 0.25
        return []

    schedule(steps[0], 1.0)
    schedule(None, 100.0)  # nothing to run is nobody's
    schedule(steps[1], 2.0)
    clock.now += 100.0
    for step, seconds in zip(steps, (1.25, 2.25)):
        result = StepResult(step.step_id, {}, forward_seconds=4.0, execute_seconds=5.0)
        outputs, timed = timer.update(update, step, result, {})
        assert outputs == []
        assert timed.request_ids == list(step.num_scheduled_tokens)
        assert timed.times == StepTimes(seconds, 4.0, None)


def test_only_what_was_asked_for() -> None:
    assert StepTimer.of(ObservabilityConfig()) is None
    assert StepTimer.of(ObservabilityConfig(collect_detailed_traces=("model",))) is not None
    made = FakeWorker()
    worker = cast(Worker, made)
    for words, kind in (((), FakeWorker), (("model",), FakeWorker), (("worker",), TimedWorker)):
        config = ObservabilityConfig(collect_detailed_traces=words)
        assert type(timed_workers(lambda: worker, config)()) is kind


def test_a_worker_times_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(0.0, 0.5)
    monkeypatch.setattr(step_timer, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    inner = FakeWorker(step_seconds=0.02)
    worker: Any = TimedWorker(cast(Worker, inner))
    result = worker.execute(ScheduledStep(0, {}))
    assert (result.execute_seconds, result.forward_seconds) == (0.5, 0.02)
    worker.warm_up()
    assert inner.calls == ["warm_up"]


async def test_every_chunk_of_a_prompt_counts(overlapped: bool) -> None:
    timed = Timed(overlapped=overlapped, max_num_seqs=4, max_num_batched_tokens=8)
    times = await timed.run("x" * 20, "r", max_tokens=4)
    assert (times.forward, times.execute) == (6.0, 9.0), "three chunks, three more tokens"
    assert 0 < times.scheduler < 5
    await timed.engine.shutdown()


@pytest.mark.parametrize("at_once", [1, 64])
async def test_a_step_of_several_completions_counts_once(overlapped: bool, at_once: int) -> None:
    timed = Timed(overlapped=overlapped, max_num_seqs=at_once)
    for kind in RequestOutputKind:
        name = f"r{kind}"
        times = await timed.run("abcd", name, max_tokens=5, n=3, output_kind=kind)
        assert times.forward == timed.num_steps(name) == (15 if at_once == 1 else 5)
    await timed.engine.shutdown()


async def test_preempted_requests(overlapped: bool) -> None:
    timed = Timed(overlapped=overlapped, num_blocks=30)
    names = [f"r{i}" for i in range(6)]
    found = await asyncio.gather(*(timed.run(n * 8, n, max_tokens=40) for n in names))
    assert (await timed.engine.stats()).num_preemptions > 0
    assert [times.forward for times in found] == [timed.num_steps(n) for n in names]
    await timed.engine.shutdown()


async def test_steps_that_raise_count_for_nobody(overlapped: bool) -> None:
    timed = Timed(overlapped=overlapped)
    other = asyncio.create_task(timed.run("other", "other", max_tokens=30))
    with pytest.raises(GenerateError):
        await timed.run("x", "bad", max_tokens=9, extra_args={"raise_at": 3})
    assert (await other).forward == timed.num_steps("other")
    await timed.engine.shutdown()
    assert not timed.timer._scheduling


async def test_who_is_aborted_or_stopped_has_the_steps_so_far(overlapped: bool) -> None:
    timed = Timed(overlapped=overlapped)
    stream = timed.engine.generate(
        "x", SamplingParams(max_tokens=400, ignore_eos=True, output_kind=DELTA), "r"
    )
    first = await anext(stream)
    assert times_of(first).forward == len(first.outputs[0].token_ids)
    await timed.engine.abort(["r"])
    rest = [first, *[output async for output in stream]]
    assert rest[-1].outputs[0].finish_reason == "abort"
    num_tokens = sum(len(output.outputs[0].token_ids) for output in rest)
    assert times_of(rest[-1]).forward == num_tokens
    stopped = timed.engine.generate("ab", SamplingParams(max_tokens=400, stop=list("aeiou")), "s")
    output = [output async for output in stopped][-1]
    assert output.outputs[0].finish_reason == "stop"
    assert times_of(output).forward == len(output.outputs[0].token_ids)
    await timed.engine.shutdown()


async def test_without_the_option_nothing_is_collected() -> None:
    engine = Engine(
        InprocClient(lambda _: make_core()), InputProcessor(CharTokenizer(), served_model())
    )
    async for output in engine.generate("x", SamplingParams(max_tokens=3), "r"):
        assert output.metrics is not None
        assert output.metrics.step_times is None
    await engine.shutdown()
