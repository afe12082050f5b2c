"""The loop itself: commands, fences, statistics, idleness; and how a core is built."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from engine_fakes import (
    EOS,
    PATIENCE,
    FakeExecutor,
    FakeWorker,
    Turnstile,
    expected_tokens,
    make_core,
)

from headrace_core.engine import EngineStats
from headrace_core.errors import CapacityError, EngineDead
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace_engine.core import EngineCore
from headrace_engine.loop import EngineLoop, describe_stats
from headrace_engine.messages import CoreOutput, CoreOutputs
from headrace_engine.startup import StartupTimeline
from headrace_testing.waiting import wait_until


class Sink:
    def __init__(self) -> None:
        self.steps: list[CoreOutputs] = []
        self.deaths: list[BaseException] = []

    def on_outputs(self, outputs: CoreOutputs) -> None:
        self.steps.append(outputs)

    def on_death(self, error: BaseException) -> None:
        self.deaths.append(error)

    def of(self, request_id: str) -> list[CoreOutput]:
        return [o for step in self.steps for o in step.outputs if o.request_id == request_id]


def request(name: str, max_tokens: int = 10, **changes: Any) -> CoreRequest:
    values: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": [ord(c) for c in name],
        "params": SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        "stop_token_ids": frozenset({EOS}),
        "max_tokens": max_tokens,
        "arrival_time": time.time(),
    }
    return CoreRequest(**{**values, **changes})


def test_who_comes_early_in_a_step_is_part_of_the_next() -> None:
    turnstile = Turnstile(3)
    core, sink = make_core(step_seconds=0.2, turnstile=turnstile), Sink()
    loop = EngineLoop(core, sink, clock=lambda: 0.0)
    loop.add([request("a", 12)])
    loop.start()
    wait_until(lambda: len(sink.steps) == 3)  # the fourth step has begun, for ever so long
    loop.add([request("b", 2)])
    loop.stats().result(PATIENCE)  # "b" is in
    turnstile.release(100)
    wait_until(lambda: bool(sink.of("b")))
    loop.stop()
    first = next(i for i, step in enumerate(sink.steps) if len(step.outputs) == 2)
    assert first == 4, "scheduled for the fifth step, not for the sixth"


def test_a_running_step_does_not_keep_commands_waiting() -> None:
    turnstile = Turnstile(3)
    core, sink = make_core(step_seconds=0.5, turnstile=turnstile), Sink()
    loop = EngineLoop(core, sink, clock=lambda: 0.0)
    loop.add([request("a", 100)])
    loop.start()
    wait_until(lambda: len(sink.steps) == 3)
    assert loop.stats().result(PATIENCE).num_steps == 4, "while the fourth one runs"
    turnstile.release(1000)
    loop.stop()


def test_a_step_s_outputs_arrive_together() -> None:
    core, sink = make_core(), Sink()
    loop = EngineLoop(core, sink)
    loop.add([request(f"r{i}") for i in range(8)])
    loop.start()
    wait_until(lambda: all(sink.of(f"r{i}") and sink.of(f"r{i}")[-1].finish_reason
                           for i in range(8)))  # fmt: skip
    loop.stop()
    assert max(len(step.outputs) for step in sink.steps) == 8
    for index in range(8):
        tokens = [t for o in sink.of(f"r{index}") for t in o.new_token_ids]
        assert tokens == expected_tokens(
            f"r{index}", SamplingParams(max_tokens=10, ignore_eos=True)
        )


def test_overlapping_keeps_two_steps_in_flight() -> None:
    turnstile = Turnstile()
    core = make_core(overlapped=True, turnstile=turnstile)
    depth = []
    submit = core.executor.submit

    def watched(step: Any) -> Any:
        depth.append(core.scheduler.num_steps_in_flight)  # type: ignore[attr-defined]
        return submit(step)

    core.executor.submit = watched  # type: ignore[method-assign]
    sink = Sink()
    loop = EngineLoop(core, sink)
    loop.start()
    loop.add([request("r", 20)])
    wait_until(lambda: 2 in depth)
    turnstile.open()
    wait_until(lambda: sink.of("r") and sink.of("r")[-1].finish_reason)
    loop.stop()
    assert max(depth) == 2


@pytest.mark.req("REL-01")
def test_a_request_that_the_scheduler_refuses_fails_alone() -> None:
    sink = Sink()
    loop = EngineLoop(make_core(num_blocks=10), sink)
    loop.start()
    too_long = request("long", prompt_token_ids=[97] * 200)
    loop.add([request("a"), too_long, request("b")])
    wait_until(lambda: sink.of("b") and sink.of("b")[-1].finish_reason)
    loop.stop()
    assert sink.of("long")[0].finish_reason == "error"
    assert "long" in sink.of("long")[0].request_id
    assert sink.of("a")[-1].finish_reason == sink.of("b")[-1].finish_reason == "length"
    assert sink.deaths == []


def test_broken_invariants_are_fatal_and_said_once() -> None:
    core, sink = make_core(), Sink()
    loop = EngineLoop(core, sink)

    def broken(*_: object) -> Any:
        raise RuntimeError("the books do not balance")

    core.update = broken  # type: ignore[method-assign]
    loop.start()
    loop.add([request("r")])
    wait_until(lambda: sink.deaths)
    assert isinstance(loop.failure, EngineDead)
    assert "books" in str(loop.failure)
    assert len(sink.deaths) == 1
    assert core.executor.is_shut_down  # type: ignore[attr-defined]
    with pytest.raises(EngineDead):
        loop.stats().result(PATIENCE)
    loop.stop()
    assert len(sink.deaths) == 1


def test_stopped_is_not_dead() -> None:
    core, sink = make_core(), Sink()
    loop = EngineLoop(core, sink)
    loop.start()
    loop.stop()
    loop.stop()
    assert not loop.is_alive
    assert loop.failure is None
    assert sink.deaths == []
    with pytest.raises(EngineDead, match="shut down"):
        loop.reset_prefix_cache().result(PATIENCE)


def test_a_failing_control_call_fails_its_caller_only() -> None:
    core, sink = make_core(), Sink()
    loop = EngineLoop(core, sink)
    core.reset_prefix_cache = lambda *_: 1 / 0  # type: ignore[method-assign, assignment]
    loop.start()
    with pytest.raises(ZeroDivisionError):
        loop.reset_prefix_cache().result(PATIENCE)
    assert isinstance(loop.stats().result(PATIENCE), EngineStats)
    loop.stop()


def test_idle_does_nothing() -> None:
    core, sink = make_core(), Sink()
    now, rounds = 0.0, 0
    schedule = core.schedule

    def counted() -> Any:
        nonlocal rounds
        rounds += 1
        return schedule()

    core.schedule = counted  # type: ignore[method-assign]
    loop = EngineLoop(core, sink, clock=lambda: now)
    loop.start()
    wait_until(lambda: loop._idle)
    before, now = rounds, 1000.0
    for _ in range(5):
        loop.stats().result(PATIENCE)  # makes it go round once
        wait_until(lambda: loop._idle)
    assert rounds <= before + 5
    assert loop.heartbeat_age == 0.0
    loop.stop()


def test_step_sizes_are_drained() -> None:
    core, sink = make_core(), Sink()
    loop = EngineLoop(core, sink)
    loop.start()
    loop.add([request("abcd", 3)])
    wait_until(lambda: sink.of("abcd") and sink.of("abcd")[-1].finish_reason)
    stats = loop.stats(drain=True).result(PATIENCE)
    assert stats.step_tokens[:3] == [4, 1, 1]
    assert stats.block_size == 4
    assert loop.stats().result(PATIENCE).step_tokens == []
    loop.stop()


def test_periodic_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now, turnstile = 0.0, Turnstile(5)
    core, sink = make_core(log_stats_interval=10.0, turnstile=turnstile), Sink()
    loop = EngineLoop(core, sink, clock=lambda: now)
    loop.start()
    loop.add([request("r", 100)])
    wait_until(lambda: len(sink.of("r")) == 5)
    assert "tokens/s" not in caplog.text, "before its time"
    now = 10.0
    turnstile.release()
    wait_until(lambda: "tokens/s" in caplog.text)
    turnstile.open()
    loop.stop()
    [line] = [m for m in caplog.messages if "tokens/s" in m]
    for part in ("prompt", "generation", "running 1", "waiting 0", "KV cache", "prefix hits"):
        assert part in line


def test_rates_are_those_of_the_interval() -> None:
    before = EngineStats(prompt_tokens=100, prefix_cache_queries=10, prefix_cache_hits=10)
    now = EngineStats(
        prompt_tokens=300, generation_tokens=50, prefix_cache_queries=30, prefix_cache_hits=15
    )
    line = describe_stats(before, now, 2.0)
    assert "prompt 100.0 tokens/s, generation 25.0 tokens/s" in line
    assert "prefix hits 25.0%" in line


def config(**cache: Any) -> EngineConfig:
    return EngineConfig(
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, async_scheduling=True),
        cache=CacheConfig(block_size=16, **cache),
    )


@pytest.mark.req("REL-12")
def test_building_a_core() -> None:
    worker, timeline = FakeWorker(), StartupTimeline()
    core = EngineCore.build(
        config(num_gpu_blocks_override=20),
        max_model_len=128,
        executor=FakeExecutor(worker),
        timeline=timeline,
    )
    timeline.finish()
    assert worker.calls == ["load", "kv_specs", "profile", "allocate_cache", "warm_up"]
    assert list(timeline.seconds)[1:4] == ["start workers", "load model", "profile memory"]
    assert "KV cache" in core.memory_plan
    assert core.block_size == 16
    assert core.overlapped
    sink = Sink()
    loop = EngineLoop(core, sink)
    loop.start()
    loop.add([request("built")])
    wait_until(lambda: sink.of("built") and sink.of("built")[-1].finish_reason)
    loop.stop()


def test_a_failed_start_frees_the_workers() -> None:
    executor = FakeExecutor(FakeWorker())
    with pytest.raises(CapacityError):
        EngineCore.build(
            config(num_gpu_blocks_override=2),
            max_model_len=4096,
            executor=executor,
            timeline=StartupTimeline(),
        )
    assert executor.is_shut_down


def test_timeline_shows_what_no_phase_covers() -> None:
    now = 0.0
    timeline = StartupTimeline(clock=lambda: now)
    with timeline.phase("load"):
        now += 3.0
    now += 1.0
    with pytest.raises(ValueError), timeline.phase("load"):  # noqa: PT012
        now += 1.0
        raise ValueError
    timeline.finish()
    now += 100
    assert timeline.seconds == {"load": 4.0}
    assert timeline.wall == 5.0
    assert timeline.accounted == pytest.approx(0.8)
    lines = timeline.describe().splitlines()
    assert [line.split()[0] for line in lines] == ["load", "other", "total"]
    assert "20.0%" in lines[1]
