"""Requests that merely go on are handled in bulk, with the very same steps and outputs as one by one."""

from __future__ import annotations

import dataclasses
import gc
from collections import deque
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_core.kv import KVCacheConfig
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_core.step import RequestStepResult, ScheduledStep, StepResult
from headrace_engine.config import SchedulerConfig
from headrace_engine.kv.events import BlockEventLog
from headrace_engine.kv.manager import PagedKVCacheManager
from headrace_engine.kv_transfer.moves import block_sizes
from headrace_engine.kv_transfer.scheduler import KVTransfer
from headrace_engine.kv_transfer.settings import FAIL, PRODUCER
from headrace_engine.messages import CoreOutput
from headrace_engine.scheduler import decode_group
from headrace_engine.scheduler.draft_limits import DraftLimits
from headrace_engine.scheduler.request import SchedulerRequest
from headrace_engine.scheduler.scheduler import Scheduler
from headrace_testing.engine.kv_managers import cache_config
from headrace_testing.engine.schedulers import CheckingWorker, batched, expected_tokens

VOCAB_SIZE, MAX_MODEL_LEN, BLOCK_SIZE = 7, 40, 4
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module", autouse=True)
def few() -> Iterator[None]:
    """A few requests are enough for a group."""
    with mock.patch.object(decode_group, "FEWEST_RUNNING", 1):
        yield


class Watchful(PagedKVCacheManager):
    """Says of no request that nothing happens to it, so that all are looked at in each step; has no short way
    for caches of one group."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._is_plain = False

    def quiet_until(self, request_id: str) -> tuple[int, int]:
        return 0, 0


def saving(cache: KVCacheConfig, kv: PagedKVCacheManager, *, full_blocks: bool) -> KVTransfer:
    """A connector that takes blocks and has none."""
    blocks: Any = SimpleNamespace(left=lambda request_id: None)
    settings = {"kv_role": PRODUCER, "kv_load_failure_policy": FAIL}
    sizes = block_sizes(cache)
    return KVTransfer(
        blocks, settings, "model", cache, kv, block_bytes=sizes, saves_full_blocks=full_blocks
    )


class Twin:
    """A scheduler and a worker that checks. ``batches``: in bulk; else one by one."""

    def __init__(self, world: dict[str, Any], *, batches: bool) -> None:
        self.batches = batches
        self.objects, self.slow = world["objects"], world["slow"]
        budget = max(world["budget"], world["max_num_seqs"])
        size = world.get("block_size", BLOCK_SIZE)
        cache = cache_config(world["num_blocks"] + 1, *world["groups"], block_size=size)
        manager = PagedKVCacheManager if batches else Watchful
        self.events = BlockEventLog(size)
        kv = manager(cache, world["caching"], MAX_MODEL_LEN, budget, events=self.events)
        transfer = None
        if world.get("saves") and world["caching"]:
            transfer = saving(cache, kv, full_blocks=world["saves"] == "full blocks")
        drafts = world.get("drafts", 0)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_batched_tokens=budget,
                max_num_seqs=world["max_num_seqs"],
                policy=world["policy"],
                encoder_share=0.0,
            ),
            kv,
            max_model_len=MAX_MODEL_LEN,
            async_scheduling=world["overlapped"],
            clock=lambda: 0.0,
            transfer=transfer,
            drafts=DraftLimits(drafts) if drafts else None,
        )
        self.worker = CheckingWorker(cache, VOCAB_SIZE, lambda name, count: (drafts, count % 3))
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
        for name in self._some(result.requests, step.step_id // 3, self.slow):
            result.requests[name].is_slow = bool(result.requests[name].token_ids)
        if not self.batches:
            return self.scheduler.update(step, result)
        told: dict[str, int] = {}
        result = batched(result)
        for name in self._some(result.tokens, step.step_id, self.objects):
            result.requests[name] = RequestStepResult([result.tokens.pop(name)])
        outputs = self.scheduler.update(step, result, told)
        self.num_told += len(told)
        order = list(step.num_scheduled_tokens)
        outputs += [CoreOutput(name, [token]) for name, token in told.items()]
        return sorted(outputs, key=lambda output: order.index(output.request_id))

    @staticmethod
    def _some(names: Iterable[str], turn: int, every: int) -> list[str]:
        """One of ``every`` requests, others at each turn; none: of 0."""
        return [name for name in names if every and (int(name[1:]) + turn) % every == 0]

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
        "groups": st.sampled_from([("full",), ("full",), ("full", "sliding"), ("wide", "chunked")]),
        "budget": st.integers(3, 40),
        "max_num_seqs": st.integers(1, 8),
        "policy": st.sampled_from(["fcfs", "priority", "fair"]),
        "caching": st.booleans(),
        "overlapped": st.booleans(),
        "objects": st.sampled_from([0, 0, 2, 5]),
        "slow": st.sampled_from([0, 0, 0, 4]),
        "unread": st.sampled_from([2, 3, 32]),
        "drafts": st.sampled_from([0, 0, 0, 2]),
        "saves": st.sampled_from(["", "", "full blocks", "blocks given up"]),
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
    with mock.patch.object(decode_group, "MAX_UNREAD_STEPS", world["unread"]):
        compare(world, moves)


def compare(world: dict[str, Any], moves: list[tuple[str, Any]]) -> None:
    """Make the same moves in bulk and one by one, and compare steps, outputs and all state."""
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
        pools = [
            [(pool.num_cached, pool.free_blocks()) for pool in twin.scheduler._kv.pools]
            for twin in twins
        ]
        assert pools[0] == pools[1]
        stats = [twin.scheduler.stats() for twin in twins]
        assert stats[0] == stats[1]
        events = [twin.events.take() for twin in twins]
        assert events[0] == events[1]


def quiet_twin(num_requests: int = 4, max_tokens: int = 20, **changes: Any) -> Twin:
    world = {
        "num_blocks": 60, "groups": ("full",), "budget": 40, "max_num_seqs": 8, "policy": "fcfs",
        "caching": True, "overlapped": True, "objects": 0, "slow": 0, **changes,
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


def run_members(twin: Twin, steps: int = 8) -> list[Any]:
    """All requests are members of the group after these steps, one step in flight: their states."""
    twin.schedule()
    for _ in range(steps):
        twin.schedule()
        twin.land()
    states = list(twin.scheduler._tracker.requests.values())
    assert twin.scheduler._tracker.decoding.size == len(states)
    return states


def test_a_few_requests_are_looked_at_one_by_one() -> None:
    with mock.patch.object(decode_group, "FEWEST_RUNNING", 5):
        twin = quiet_twin(4)
        twin.schedule()
        for _ in range(9):
            twin.schedule()
            twin.land()
        assert twin.scheduler._tracker.decoding.size == 0
        move(twin, "add", (PROMPT, 20, (), 0, 0), 4)
        for _ in range(6):
            twin.schedule()
            twin.land()
        assert twin.scheduler._tracker.decoding.size == 5


def test_requests_that_leave_the_group_end_in_the_order_in_which_they_run() -> None:
    """Some results are objects, the others' tokens stop their requests in the same step: blocks are freed in
    the order of the requests."""
    straight = expected_tokens(PROMPT, 30, VOCAB_SIZE)
    stop = next(one for one in straight[8:] if one not in straight[:8])
    world = {
        "num_blocks": 60, "groups": ("full",), "budget": 40, "max_num_seqs": 8, "policy": "fcfs",
        "caching": False, "overlapped": True, "objects": 2, "slow": 0,
    }  # fmt: skip
    compare(world, [("add", (PROMPT, 24, (stop,), 0, 0))] * 6)


def test_members_of_the_group_are_not_touched_by_a_step() -> None:
    twin = quiet_twin(4, 36, block_size=32)
    states = run_members(twin)
    before = [(s.num_computed_tokens, len(s.all_token_ids)) for s in states]
    for _ in range(5):
        twin.schedule()
        twin.land()
    assert [(s.own_computed, len(s.own_token_ids)) for s in states] == before
    assert [s.num_computed_tokens for s in states] == [before[0][0] + 5] * 4
    assert [len(s.all_token_ids) for s in states] == [before[0][1] + 5] * 4


@pytest.mark.parametrize("how", ["abort", "suspend"])
def test_nothing_is_told_of_a_member_that_is_gone(how: str) -> None:
    twin = quiet_twin(3)
    run_members(twin)
    getattr(twin.scheduler, how)(["r1"])
    told = [one.request_id for one in twin.land() if one.new_token_ids]
    assert told == (["r0", "r2"] if how == "abort" else ["r0", "r1", "r2"])
    assert twin.scheduler._tracker.decoding.size == 2


def test_a_member_without_a_result_ends() -> None:
    twin = quiet_twin(3)
    run_members(twin)
    step = twin.in_flight.popleft()
    result = batched(twin.worker.execute(step))
    del result.tokens["r1"]
    told: dict[str, int] = {}
    (output,) = twin.scheduler.update(step, result, told)
    assert (output.request_id, output.finish_reason) == ("r1", "error")
    assert "no result" in str(output.error)
    assert list(told) == ["r0", "r2"]


def test_tokens_of_requests_that_are_not_in_the_step_are_told_of_nobody() -> None:
    twin = quiet_twin(3)
    run_members(twin)
    step = twin.in_flight.popleft()
    result = batched(twin.worker.execute(step))
    result.tokens["stranger"] = 1
    told: dict[str, int] = {}
    assert twin.scheduler.update(step, result, told) == []
    assert list(told) == ["r0", "r1", "r2"]


def test_a_prompt_before_members_is_scheduled_before_them() -> None:
    """It may take what the step has room for, so that the group waits its turn behind it."""
    twin = quiet_twin(3, budget=8, policy="priority")
    run_members(twin)
    move(twin, "add", (list(range(1, 20)), 4, (), 0, -1), 9)
    first, second = (twin.schedule()[1], twin.schedule())
    assert (first, second) == (["r0", "r1", "r2", "r9"], None)
    twin.land()
    assert twin.schedule()[1] == ["r9"], "the rest of its prompt fills the step"


def test_ended_requests_are_not_kept_for_the_group() -> None:
    twin = quiet_twin(0)
    names = ["r7001", "r7002"]
    for number in (7001, 7002):
        move(twin, "add", (PROMPT, 20, (), 0, 0), number)
    run_members(twin)
    twin.scheduler.abort(names)
    twin.land()
    gc.collect()
    kept = [one for one in gc.get_objects() if type(one) is SchedulerRequest]
    assert not [one for one in kept if one.request_id in names]
