"""Requests that merely go on are handled in bulk, with the very same steps and outputs as one by one."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_core.step import RequestStepResult, ScheduledStep, StepResult
from headrace_engine.config import SchedulerConfig
from headrace_engine.kv.manager import PagedKVCacheManager
from headrace_engine.messages import CoreOutput
from headrace_engine.scheduler.scheduler import Scheduler
from headrace_testing.engine.kv_managers import cache_config
from headrace_testing.engine.schedulers import CheckingWorker, batched, expected_tokens

VOCAB_SIZE, MAX_MODEL_LEN, BLOCK_SIZE = 7, 40, 4
PROMPT = [1, 2, 3]


class Watchful(PagedKVCacheManager):
    """Says of no request that nothing happens to it: all are looked at in each step."""

    def quiet_until(self, request_id: str, *, last_is_known: bool = True) -> int:
        return 0


class Twin:
    """A scheduler and a worker that checks. ``batches``: in bulk; else one by one."""

    def __init__(self, world: dict[str, Any], *, batches: bool) -> None:
        self.batches = batches
        budget = max(world["budget"], world["max_num_seqs"])
        cache = cache_config(world["num_blocks"] + 1, *world["groups"], block_size=BLOCK_SIZE)
        manager = PagedKVCacheManager if batches else Watchful
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_batched_tokens=budget,
                max_num_seqs=world["max_num_seqs"],
                policy=world["policy"],
                encoder_share=0.0,
            ),
            manager(cache, world["caching"], MAX_MODEL_LEN, budget),
            max_model_len=MAX_MODEL_LEN,
            async_scheduling=world["overlapped"],
            clock=lambda: 0.0,
        )
        self.worker = CheckingWorker(cache, VOCAB_SIZE)
        self.in_flight: deque[ScheduledStep] = deque()
        self.num_told = 0

    def schedule(self) -> Any:
        """The step as plain data, the order of its requests included."""
        step = self.scheduler.schedule()
        if step is None:
            return None
        self.in_flight.append(step)
        return [dataclasses.astuple(step), list(step.num_scheduled_tokens)]

    def land(self, error: int | None = None) -> list[CoreOutput]:
        step = self.in_flight.popleft()
        result = self.worker.execute(step)
        if error is not None and result.requests:
            name = list(result.requests)[error % len(result.requests)]
            result.requests[name] = RequestStepResult(error="broken")
        if not self.batches:
            return self.scheduler.update(step, result)
        told: dict[str, int] = {}
        outputs = self.scheduler.update(step, batched(result), told)
        self.num_told += len(told)
        order = list(step.num_scheduled_tokens)
        outputs += [CoreOutput(name, [token]) for name, token in told.items()]
        return sorted(outputs, key=lambda output: order.index(output.request_id))

    def fail(self) -> list[CoreOutput]:
        step = self.in_flight.popleft()
        self.worker.skip(step)
        outputs = self.scheduler.fail(step, "broken")
        while self.in_flight:
            late = self.in_flight.popleft()
            self.worker.skip(late)
            tokens = dict.fromkeys(late.num_scheduled_tokens, 0)
            outputs += self.scheduler.update(late, StepResult(late.step_id, {}, tokens=tokens), {})
        return outputs

    def ids(self, which: int) -> list[str]:
        names = sorted(self.scheduler._tracker.requests)
        return [names[which % len(names)]] if names else []


worlds = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(20, 60),
        "groups": st.sampled_from([("full",), ("full",), ("full", "sliding")]),
        "budget": st.integers(3, 40),
        "max_num_seqs": st.integers(1, 8),
        "policy": st.sampled_from(["fcfs", "priority", "fair"]),
        "caching": st.booleans(),
        "overlapped": st.booleans(),
    }
)
requests = st.tuples(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(1, 24),
    st.sampled_from([(), (), (4,), (0, 4)]),
    st.integers(0, 6),
    st.integers(-1, 1),
)
moves = st.one_of(
    st.tuples(st.just("add"), requests),
    st.tuples(st.sampled_from(["run", "run", "run", "step", "step"]), st.integers(1, 12)),
    st.tuples(
        st.sampled_from(["error", "abort", "suspend", "resume", "preempt_all", "fail", "schedule"]),
        st.integers(0, 9),
    ),
)  # fmt: skip


def told(outputs: list[CoreOutput]) -> list[Any]:
    """Outputs, but for what only the first of a request need say."""
    seen = []
    for one in outputs:
        plain = dataclasses.replace(
            one, num_cached_tokens=0, num_preemptions=0, queued_ts=0, scheduled_ts=0
        )
        seen.append(plain)
    return seen


def move(twin: Twin, name: str, drawn: Any, number: int) -> list[Any]:
    scheduler, seen = twin.scheduler, []
    if name == "add":
        prompt, max_tokens, stop, min_tokens, priority = drawn
        scheduler.add(
            CoreRequest(
                request_id=f"r{number}",
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=24, min_tokens=min(min_tokens, max_tokens)),
                stop_token_ids=frozenset(stop),
                max_tokens=max_tokens,
                arrival_time=float(number),
                priority=priority,
                owner="ab"[number % 2],
            )
        )
    elif name in ("run", "step"):
        for _ in range(drawn):
            seen.append(twin.schedule())
            if name == "run" and len(twin.in_flight) == 1:
                seen.append(twin.schedule())
            if twin.in_flight:
                seen.append(told(twin.land()))
    elif name == "schedule":
        seen.append(twin.schedule())
    elif name == "preempt_all":
        scheduler.preempt_all()
    elif name in ("error", "fail"):
        if twin.in_flight:
            seen.append(told(twin.land(drawn) if name == "error" else twin.fail()))
    else:
        seen.append(getattr(scheduler, name)(twin.ids(drawn)))
    return seen


@settings(max_examples=40, deadline=None)
@given(world=worlds, moves=st.lists(moves, min_size=4, max_size=30))
def test_bulk_is_one_by_one(world: dict[str, Any], moves: list[tuple[str, Any]]) -> None:
    twins = [Twin(world, batches=batches) for batches in (False, True)]
    end = [("run", 200)]
    for number, (name, drawn) in enumerate([*moves, ("resume", 0), *end]):
        first, second = (move(twin, name, drawn, number) for twin in twins)
        assert first == second
        states = [
            [
                (s.request_id, s.all_token_ids, s.num_computed_tokens, s.num_placeholders, s.status)
                for s in twin.scheduler._tracker.requests.values()
            ]
            for twin in twins
        ]
        assert states[0] == states[1]
        counts = [twin.scheduler.stats().generation_tokens for twin in twins]
        assert counts[0] == counts[1]


def quiet_twin(num_requests: int = 4, max_tokens: int = 20, **changes: Any) -> Twin:
    world = {
        "num_blocks": 60, "groups": ("full",), "budget": 40, "max_num_seqs": 8, "policy": "fcfs",
        "caching": True, "overlapped": True, **changes,
    }  # fmt: skip
    twin = Twin(world, batches=True)
    for number in range(num_requests):
        move(twin, "add", (PROMPT, max_tokens, (), 0, 0), number)
    return twin


def test_requests_that_go_on_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """One look for each new block, at which the one before is full of known tokens."""
    twin = quiet_twin()
    looks = []
    allocate = PagedKVCacheManager.allocate

    def counted(self: Any, sequence: Any, *args: Any) -> Any:
        looks.append(sequence.request_id)
        return allocate(self, sequence, *args)

    monkeypatch.setattr(PagedKVCacheManager, "allocate", counted)
    move(twin, "run", 200, 0)
    assert twin.num_told == 4 * 18, "all tokens but the first and the last of each"
    assert len(looks) <= 4 * (20 // BLOCK_SIZE + 3), "prompt, second token, blocks, last token"


def test_without_somewhere_to_put_tokens_each_request_has_an_output() -> None:
    twin = quiet_twin(2, 6)
    outputs: list[CoreOutput] = []
    while (step := twin.scheduler.schedule()) is not None:
        outputs += twin.scheduler.update(step, batched(twin.worker.execute(step)))
    assert [one.request_id for one in outputs] == ["r0", "r1"] * 6
    assert all(len(one.new_token_ids) == 1 for one in outputs)


@pytest.mark.parametrize("away", ["preempt_all", "suspend"])
def test_a_request_that_was_away_is_looked_at_and_told_of_again(away: str) -> None:
    """Computed again in parts, shorter than where it was quiet before."""
    twin = quiet_twin(1, 20, budget=3, max_num_seqs=3, caching=False)
    outputs: list[CoreOutput] = []

    def run(steps: int) -> None:
        for _ in range(steps):
            if twin.schedule() is not None:
                outputs.extend(twin.land())

    run(11)
    state = twin.scheduler._tracker.requests["r0"]
    assert state.is_quiet
    move(twin, away, 0, 0)
    if away == "suspend":
        move(twin, "resume", 0, 0)
    assert not state.is_quiet
    count = len(outputs)
    run(40)
    assert [token for one in outputs for token in one.new_token_ids] == expected_tokens(
        PROMPT, 20, VOCAB_SIZE
    )
    assert outputs[count].num_preemptions == (away == "preempt_all")
    assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize("min_tokens", [0, 9])
def test_a_stop_token_ends_a_quiet_request(min_tokens: int) -> None:
    straight = expected_tokens(PROMPT, 30, VOCAB_SIZE)
    stop = next(one for one in straight[4:] if one not in straight[:4])
    twin = quiet_twin(0)
    move(twin, "add", (PROMPT, 30, (stop,), min_tokens, 0), 0)
    outputs = [one for _ in range(40) if twin.schedule() is not None for one in twin.land()]
    end = straight.index(stop, max(0, min_tokens - 1)) + 1
    assert [token for one in outputs for token in one.new_token_ids] == straight[:end]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == ("stop", stop)
