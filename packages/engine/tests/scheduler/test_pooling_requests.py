"""Requests that end with their prompts: in the scheduler they are requests like others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_core.arrays import PackedArray
from headrace_core.errors import PromptTooLong
from headrace_core.pooling import PoolingParams
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_core.step import RequestStepResult, ScheduledStep, StepResult
from headrace_engine.config import SchedulerConfig
from headrace_engine.kv.factory import UncachedKVManager
from headrace_engine.kv.manager import PagedKVCacheManager
from headrace_engine.messages import CoreOutput
from headrace_engine.scheduler.scheduler import Scheduler
from headrace_testing.engine.kv_managers import cache_config

RESULT = PackedArray("float32", (0,), b"")


class World:
    """A scheduler, and results as a worker would make them."""

    def __init__(self, *, cached: bool = False, budget: int = 10, seqs: int = 8, **config: Any):
        kv = PagedKVCacheManager(cache_config(40, block_size=2), True, 50) if cached else None
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_batched_tokens=budget, max_num_seqs=seqs,
                enable_chunked_prefill=cached, **config,
            ),
            kv or UncachedKVManager(50),
            max_model_len=50,
            async_scheduling=True,
        )  # fmt: skip
        self.computed: dict[str, int] = {}
        self.lengths: dict[str, int] = {}

    def add(self, request_id: str, length: int, *, priority: int = 0, **params: Any) -> None:
        self.lengths[request_id] = length
        self.scheduler.add(
            CoreRequest(
                request_id, [ord(request_id[-1])] * length, SamplingParams(), frozenset(), 1, 0.0,
                priority=priority, pooling=PoolingParams(task="embed", **params),
            )
        )  # fmt: skip

    def schedule(self) -> ScheduledStep | None:
        step = self.scheduler.schedule()
        for new in step.new_requests if step else ():
            self.computed[new.request_id] = new.num_computed_tokens
        return step

    def result(self, step: ScheduledStep) -> StepResult:
        results = {}
        for request_id, count in step.num_scheduled_tokens.items():
            self.computed[request_id] += count
            complete = self.computed[request_id] == self.lengths[request_id]
            results[request_id] = RequestStepResult(pooled=RESULT if complete else None)
        return StepResult(step.step_id, results)

    def step(self) -> tuple[dict[str, int], list[CoreOutput]]:
        step = self.schedule()
        assert step is not None
        return step.num_scheduled_tokens, self.scheduler.update(step, self.result(step))


def test_a_request_ends_with_its_prompt() -> None:
    world = World()
    world.add("a", 4)
    scheduled, (output,) = world.step()
    assert scheduled == {"a": 4}
    assert (output.pooled, output.finish_reason, output.new_token_ids) == (RESULT, "stop", [])
    assert not world.scheduler.has_unfinished
    stats = world.scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.kv_cache_usage) == (4, 0, 0.0)


def test_prompts_are_whole_and_shorter_ones_take_what_is_left() -> None:
    world = World(budget=10)
    for name, length in (("a", 6), ("b", 7), ("c", 3), ("d", 2), ("e", 1)):
        world.add(name, length)
    assert world.step()[0] == {"a": 6, "c": 3, "e": 1}
    assert world.step()[0] == {"b": 7, "d": 2}


def test_the_longest_prompt_has_its_turn_while_short_ones_keep_coming() -> None:
    world = World(budget=10, seqs=4)
    world.add("s0", 4)
    world.add("long", 10)
    for i in range(1, 6):
        world.add(f"s{i}", 3)
    assert list(world.step()[0]) == ["s0", "s1", "s2"]
    assert world.step()[0] == {"long": 10}


def test_steps_overlap_without_a_request_running_twice() -> None:
    world = World(budget=10)
    world.add("a", 6)
    world.add("b", 8)
    first, second = world.schedule(), world.schedule()
    assert first is not None
    assert second is not None
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"a": 6}, {"b": 8})
    assert world.schedule() is None
    assert [o.request_id for o in world.scheduler.update(first, world.result(first))] == ["a"]
    assert [o.request_id for o in world.scheduler.update(second, world.result(second))] == ["b"]
    world.add("c", 1)
    last = world.schedule()
    assert last is not None
    assert sorted(last.gone_request_ids) == ["a", "b"]


def test_a_prompt_as_long_as_the_context_runs_in_chunks() -> None:
    world = World(cached=True, budget=20)
    world.add("a", 50)
    assert [world.step()[0] for _ in range(3)] == [{"a": 20}, {"a": 20}, {"a": 10}]
    assert not world.scheduler.has_unfinished
    with pytest.raises(
        PromptTooLong, match=r"length is 50 tokens. However, you requested 51 tokens"
    ):
        world.add("b", 51)


def test_cached_beginnings_are_read_unless_that_would_be_wrong() -> None:
    world = World(cached=True, budget=50)
    world.add("1x", 20)
    world.step()
    world.add("2x", 20)
    assert world.step()[0] == {"2x": 2}
    world.add("3x", 20, skip_reading_prefix_cache=True)
    scheduled, (output,) = world.step()
    assert (scheduled, output.num_cached_tokens) == ({"3x": 20}, 0)


@pytest.mark.parametrize("pooled", [None, RESULT])
def test_a_result_that_does_not_fit_ends_the_request(pooled: PackedArray | None) -> None:
    world = World(cached=True, budget=10)
    world.add("a", 5 if pooled is None else 15)
    step = world.schedule()
    assert step is not None
    wrong = StepResult(step.step_id, {"a": RequestStepResult(pooled=pooled)})
    (output,) = world.scheduler.update(step, wrong)
    assert output.finish_reason == "error"
    assert output.error is not None
    assert "the worker returned" in output.error


def test_a_failed_step_is_taken_apart() -> None:
    world = World(budget=10)
    for name in "abc":
        world.add(name, 3)
    step = world.schedule()
    assert step is not None
    assert world.scheduler.fail(step, "it raised") == []
    alone = [world.step()[0] for _ in range(3)]
    assert sorted(name for step in alone for name in step) == ["a", "b", "c"]
    assert all(len(step) == 1 for step in alone)
    assert not world.scheduler.has_unfinished


def test_priorities_hold() -> None:
    world = World(budget=10, policy="priority")
    world.add("a", 8, priority=1)
    world.add("b", 8, priority=0)
    assert [world.step()[0] for _ in range(2)] == [{"b": 8}, {"a": 8}]


LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS,
    cached=st.booleans(),
    budget=st.integers(20, 40),
    seqs=st.integers(1, 5),
    abort=st.sets(st.integers(0, 11)),
    fail=st.sets(st.integers(0, 6)),
)
def test_every_request_ends_once_whatever_happens(
    lengths: list[int], cached: bool, budget: int, seqs: int, abort: set[int], fail: set[int]
) -> None:
    """Arrivals between steps, two steps in flight, aborts, and steps that raise."""
    world = World(cached=cached, budget=budget, seqs=seqs)
    ends: dict[str, list[str | None]] = {}
    in_flight: list[ScheduledStep] = []
    arrivals = list(enumerate(lengths))
    for turn in range(200):
        if arrivals:
            index, length = arrivals.pop(0)
            world.add(f"r{index}", length)
            if index in abort:
                keep(ends, world.scheduler.abort([f"r{index}"]))
        while (step := world.schedule()) is not None:
            assert len(step.num_scheduled_tokens) <= seqs
            assert step.num_tokens <= budget
            in_flight.append(step)
        if in_flight and turn in fail:
            failed, later = in_flight[0], in_flight[1:]
            keep(ends, world.scheduler.fail(failed, "it raised"))
            for step in later:  # their requests begin again: what they yield is dropped
                keep(ends, world.scheduler.update(step, StepResult(step.step_id, {})))
            in_flight = []
        elif in_flight:
            step = in_flight.pop(0)
            keep(ends, world.scheduler.update(step, world.result(step)))
        elif not arrivals and not world.scheduler.has_unfinished:
            break
    assert not world.scheduler.has_unfinished
    assert sorted(ends) == sorted(f"r{i}" for i in range(len(lengths)))
    assert all(len(reasons) == 1 for reasons in ends.values())
    allowed = {"stop", "abort"} | ({"error"} if fail else set())
    assert {reasons[0] for reasons in ends.values()} <= allowed


def keep(ends: dict[str, list[str | None]], outputs: list[CoreOutput]) -> None:
    for output in outputs:
        ends.setdefault(output.request_id, []).append(output.finish_reason)
