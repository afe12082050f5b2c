"""Random traffic on scheduler, block pool and prefix cache, against a worker that checks."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from late_worker import LateWorker
from stepwise_store import StepwiseStore

from headrace_core.errors import QueueFull, RequestError
from headrace_core.kv import NULL_BLOCK
from headrace_core.lora import LoRARequest
from headrace_core.multimodal import MediaInput
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_core.step import RequestStepResult, ScheduledStep, StepResult
from headrace_engine.config import SchedulerConfig
from headrace_engine.kv.block_pool import BlockPool
from headrace_engine.kv.manager import PagedKVCacheManager
from headrace_engine.messages import CoreOutput
from headrace_engine.scheduler.adapter_slots import SlotPlanner
from headrace_engine.scheduler.draft_limits import DraftLimits
from headrace_engine.scheduler.request import RequestStatus
from headrace_engine.scheduler.scheduler import Scheduler
from headrace_testing.engine.kv_managers import MAX_ENCODER_LEN, OWN_POOL, cache_config
from headrace_testing.engine.schedulers import CheckingWorker, batched, contents, expected_tokens

VOCAB_SIZE = 5
MAX_MODEL_LEN = 40
MOST_STEPS = 3000
"""Bound within which everything must finish; far above what the largest case needs."""

PREFIXES = ([], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 9, 9, 9], [3] * 12)

worlds = st.fixed_dictionaries(
    {
        "num_blocks_per_group": st.integers(6, 20),
        "num_states": st.integers(1, 10),
        "groups": st.sampled_from(
            [
                ("full",),
                ("full", "sliding"),
                ("sliding", "full", "sliding"),
                ("full", "cross"),
                ("recurrent",),
                ("full", "recurrent"),
                ("wide", "sliding", "recurrent"),
                ("chunked", "latent", "full"),
                ("full", "sliding", "chunked", "recurrent", "recurrent", "wide"),
            ]
        ),
        "block_size": st.integers(2, 4),
        "budget": st.integers(2, 16),
        "shared": st.one_of(st.none(), st.integers(1, 16)),
        "max_num_seqs": st.integers(1, 6),
        "policy": st.sampled_from(["fcfs", "priority", "fair"]),
        "partial": st.sampled_from([(1, 1, 0), (2, 1, 4), (3, 2, 6)]),
        "chunked": st.booleans(),
        "caching": st.sampled_from([True, True, True, False]),
        "overlapped": st.booleans(),
        "encoder_share": st.sampled_from([0.0, 0.4]),
        "late": st.sampled_from([(0, 1), (1, 1), (2, 1), (3, 2)]),
        "drafts": st.sampled_from([0, 0, 1, 3, 7]),
        "right": st.lists(st.integers(0, 7), min_size=1, max_size=8),
        "adapter_slots": st.sampled_from([0, 0, 1, 2, 3]),
        "kept_adapters": st.integers(0, 2),
        "batches": st.booleans(),
        "target_itl": st.sampled_from([None, None, 1e-9, 0.05, 1e9]),
        "target_ttft": st.sampled_from([None, None, 1e-9, 0.5, 1e9]),
    }
)

requests = st.fixed_dictionaries(
    {
        "prefix": st.sampled_from(PREFIXES),
        "suffix": st.lists(st.integers(0, 3), max_size=9),
        "salt": st.sampled_from([None, None, None, "s"]),
        "max_tokens": st.integers(1, 14),
        "min_tokens": st.integers(0, 4),
        "stop": st.sampled_from([(), (4,), (0, 4)]),
        "priority": st.integers(-1, 1),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
        "owner": st.sampled_from(["", "a", "b"]),
        "media": st.sampled_from([None, None, ("a1", 0, 6), ("b2", 0, 6), ("a1", 2, 5)]),
        "states": st.integers(1, MAX_ENCODER_LEN),
        "adapter": st.sampled_from([0, 0, 1, 2, 3, 4, 5]),
    }
)


def straight_run(request: CoreRequest) -> tuple[list[int], str]:
    """Output tokens and finish reason of a request that runs alone."""
    prompt = contents(request.prompt_token_ids, request.media)
    adapter = 0 if request.lora_request is None else request.lora_request.lora_int_id
    output = expected_tokens(prompt, request.max_tokens, VOCAB_SIZE, adapter=adapter)
    for index, token in enumerate(output):
        count = index + 1
        if token in request.stop_token_ids and count >= request.params.min_tokens:
            return output[:count], "stop"
        if count + len(request.prompt_token_ids) == MAX_MODEL_LEN:
            return output[:count], "length"
    return output, "length"


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps, results, aborts, failures and resets in any order."""

    @initialize(world=worlds)
    def start(self, world: dict[str, Any]) -> None:
        partial, long_partial, threshold = world["partial"]
        budget = max(world["budget"], world["max_num_seqs"])
        if not world["chunked"]:
            partial, long_partial, threshold, budget = 1, 1, 0, MAX_MODEL_LEN
        self.now = 0.0
        counts = Counter(kind if kind in OWN_POOL else "" for kind in world["groups"])
        per_group = {"recurrent": world["num_states"]}
        num_blocks = {
            kind: 1 + per_group.get(kind, world["num_blocks_per_group"]) * counts[common]
            for kind in world["groups"]
            for common in [kind if kind in OWN_POOL else ""]
        }
        cache = cache_config(num_blocks, *world["groups"], block_size=world["block_size"])
        self.encodes = "cross" in world["groups"]
        caching = world["caching"] and not self.encodes
        # What has seen a wrong guess cannot be taken back.
        drafts = 0 if "recurrent" in world["groups"] else world["drafts"]
        self.kv = PagedKVCacheManager(cache, caching, MAX_MODEL_LEN, budget)
        self.num_slots = world["adapter_slots"]
        self.adapters = StepwiseStore(self.num_slots + world["kept_adapters"])
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_batched_tokens=budget,
                max_num_shared_tokens=world["shared"] and min(world["shared"], budget),
                max_num_seqs=world["max_num_seqs"],
                enable_chunked_prefill=world["chunked"],
                max_num_partial_prefills=partial,
                max_long_partial_prefills=long_partial,
                long_prefill_token_threshold=threshold,
                policy=world["policy"],
                target_itl=world["target_itl"] if world["chunked"] else None,
                target_ttft=world["target_ttft"] if world["policy"] == "fcfs" else None,
                encoder_share=world["encoder_share"],
                max_queued_requests=12,
            ),
            self.kv,
            max_model_len=MAX_MODEL_LEN,
            async_scheduling=world["overlapped"],
            clock=self.tick,
            drafts=DraftLimits(drafts) if drafts else None,
            adapters=SlotPlanner(self.num_slots, self.adapters) if self.num_slots else None,
        )
        longest, every = world["late"]
        right = world["right"]
        self.worker = LateWorker(
            CheckingWorker(
                cache,
                VOCAB_SIZE,
                lambda request_id, count: (
                    right[count % len(right)],
                    right[count // 2 % len(right)],
                ),
            ),
            delay=lambda request_id, count: (len(request_id) + count) % (longest + 1),
            is_slow=lambda request_id: (len(request_id) + self.num_added) % every == 0,
        )
        self.batches = world["batches"]
        self.budget, self.max_num_seqs = budget, world["max_num_seqs"]
        self.in_flight: deque[ScheduledStep] = deque()
        self.live: dict[str, CoreRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.suspended: set[str] = set()
        self.num_added = 0
        self.tables: dict[str, tuple[list[int], ...]] = {}

    def tick(self) -> float:
        """A clock that goes on whenever it is looked at."""
        self.now += 0.01
        return self.now

    # -- what may happen -----------------------------------------------------------------------

    @rule(arrivals=st.lists(requests, min_size=1, max_size=5), reuse_id=st.booleans())
    def arrive(self, arrivals: list[dict[str, Any]], reuse_id: bool) -> None:
        for drawn in arrivals:
            self.add(drawn, "again" if reuse_id else f"r{self.num_added}")

    @precondition(lambda self: self.live or self.in_flight)
    @rule(moves=st.lists(st.booleans(), min_size=4, max_size=24))
    def proceed(self, moves: list[bool]) -> None:
        """Schedule or land, in any order: up to two steps are in flight."""
        for schedules in moves:
            if schedules or not self.in_flight:
                self.schedule()
            else:
                self.land()

    def add(self, drawn: dict[str, Any], request_id: str) -> None:
        prompt, media = [*drawn["prefix"], *drawn["suffix"]], []
        if drawn["media"] is not None and not self.encodes:
            digest, offset, count = drawn["media"]
            prompt[offset:offset] = [0] * count
            media = [MediaInput("audio", {}, digest, count, min(offset, len(prompt) - count))]
        states = drawn["states"] if self.encodes else 0
        adapter, lora = drawn["adapter"] if self.num_slots else 0, None
        if adapter:
            lora = LoRARequest(f"adapter {adapter}", adapter, f"/{adapter}")
            self.adapters.add(lora)
            while not self.adapters.find(adapter).digest:
                assert self.adapters.go_on()
        self.num_added += 1
        request = CoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=SamplingParams(
                max_tokens=drawn["max_tokens"],
                min_tokens=min(drawn["min_tokens"], drawn["max_tokens"]),
                prompt_logprobs=drawn["prompt_logprobs"],
            ),
            stop_token_ids=frozenset(drawn["stop"]),
            max_tokens=drawn["max_tokens"],
            arrival_time=float(self.num_added),
            priority=drawn["priority"],
            cache_salt=drawn["salt"],
            owner=drawn["owner"],
            media=media,
            num_encoder_tokens=states,
            lora_request=lora,
        )
        needed = min(len(prompt) + request.max_tokens, MAX_MODEL_LEN) - 1
        possible = prompt and request_id not in self.live and self.kv.fits(needed, states)
        try:
            self.scheduler.add(request)
        except QueueFull:
            assert self.scheduler.num_waiting >= 12
        except RequestError:
            assert not possible
        else:
            assert possible
            self.live[request_id], self.tokens[request_id] = request, []

    def schedule(self) -> None:
        step = self.scheduler.schedule()
        if step is None and self.adapters.go_on():
            return
        if step is None:
            idle = self.live.keys() <= self.suspended
            assert self.in_flight or idle, "work waits, nothing runs, nothing is in flight"
            return
        assert step.num_tokens + sum(step.num_drafts.values()) <= self.budget
        assert len(step.num_scheduled_tokens) <= self.max_num_seqs
        encoded = [new.request.num_encoder_tokens for new in step.new_requests]
        assert len(encoded) < 2 or sum(encoded) <= self.budget
        self.follow_tables(step)
        self.in_flight.append(step)

    def land(self) -> None:
        step = self.in_flight.popleft()
        needed = {
            request.lora_request
            for name in step.num_scheduled_tokens
            if (request := self.live.get(name)) is not None
        }
        for lora in step.placed_adapters.values():
            # One whose requests were aborted meanwhile may have been removed: its slot is nobody's.
            assert lora not in needed or self.adapters.content(lora.lora_int_id)
        result, told = self.worker.execute(step), dict[str, int]()
        if not self.batches:
            self.take(self.scheduler.update(step, result))
            return
        outputs = self.scheduler.update(step, batched(result), told)
        assert told.keys().isdisjoint(output.request_id for output in outputs)
        self.take([*outputs, *(CoreOutput(name, [token]) for name, token in told.items())])

    @precondition(lambda self: self.in_flight and self.in_flight[0].num_scheduled_tokens)
    @rule(which=st.integers(0, 9))
    def land_with_one_error(self, which: int) -> None:
        step = self.in_flight.popleft()
        result = self.worker.execute(step)
        request_id = list(result.requests)[which % len(result.requests)]
        result.requests[request_id] = RequestStepResult(error="broken")
        result.late.pop(request_id, None)
        self.take(self.scheduler.update(step, result), errors={request_id: "broken"})

    @precondition(lambda self: self.in_flight)
    @rule(late_fails=st.booleans())
    def fail(self, late_fails: bool) -> None:
        step = self.in_flight.popleft()
        self.worker.skip(step)
        outputs = self.scheduler.fail(step, "worker broke")
        assert len(outputs) <= (len(step.num_scheduled_tokens) == 1), "only the guilty one ends"
        self.take(outputs, errors=dict.fromkeys(step.num_scheduled_tokens, "worker broke"))
        while self.in_flight:  # whatever it returns was computed from garbage
            late = self.in_flight.popleft()
            self.worker.skip(late)
            if late_fails:
                outputs = self.scheduler.fail(late, "worker broke")
            else:
                garbage = {r: RequestStepResult([0]) for r in late.num_scheduled_tokens}
                outputs = self.scheduler.update(late, StepResult(late.step_id, garbage))
            assert outputs == []

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 50), twice=st.booleans())
    def abort(self, which: int, twice: bool) -> None:
        request_id = sorted(self.live)[which % len(self.live)]
        outputs = self.scheduler.abort([request_id, "unknown", *([request_id] * twice)])
        (output,) = outputs
        assert (output.request_id, output.finish_reason) == (request_id, "abort")
        del self.live[request_id]

    @precondition(lambda self: self.adapters.pending)
    @rule()
    def read_adapter(self) -> None:
        self.adapters.go_on()

    @precondition(lambda self: self.num_slots)
    @rule(which=st.integers(1, 5))
    def remove_adapter(self, which: int) -> None:
        """Requests under way go on with what was read, whatever happens to the files."""
        self.adapters.remove(which)
        while self.adapters.go_on():
            pass

    @precondition(lambda self: self.live and self.scheduler.num_running)
    @rule()
    def preempt_all(self) -> None:
        self.scheduler.preempt_all()
        assert self.scheduler.num_running == 0

    @precondition(lambda self: self.live)
    @rule(which=st.sets(st.integers(0, 50), min_size=1, max_size=4))
    def suspend(self, which: set[int]) -> None:
        request_ids = {sorted(self.live)[number % len(self.live)] for number in which}
        self.scheduler.suspend([*sorted(request_ids), "unknown"])
        self.suspended |= request_ids

    @precondition(lambda self: self.suspended)
    @rule(which=st.sets(st.integers(0, 50), min_size=1, max_size=4))
    def resume(self, which: set[int]) -> None:
        request_ids = {sorted(self.suspended)[n % len(self.suspended)] for n in which}
        self.scheduler.resume([*sorted(request_ids), "unknown"])
        self.suspended -= request_ids

    @precondition(lambda self: self.live)
    @rule(reset_running=st.booleans())
    def reset(self, reset_running: bool) -> None:
        held = self.kv.num_free_blocks < self.kv.num_blocks
        assert self.scheduler.reset_prefix_cache(reset_running) == (reset_running or not held)

    # -- what must hold ------------------------------------------------------------------------

    def take(self, outputs: list[CoreOutput], errors: dict[str, str] | None = None) -> None:
        for output in outputs:
            request = self.live[output.request_id]
            tokens = self.tokens[output.request_id]
            if output.new_token_ids and request.params.prompt_logprobs is not None and not tokens:
                assert output.prompt_logprobs is not None
                found = [(p.ranks[0], p.token_ids[0]) for p in output.prompt_logprobs]
                assert found == list(enumerate(request.prompt_token_ids))[1:]
            else:
                assert output.prompt_logprobs is None
            tokens += output.new_token_ids
            expected, reason = straight_run(request)
            assert tokens == expected[: len(tokens)]
            if output.finish_reason == "error":
                assert errors is not None
                assert errors[output.request_id] == output.error
            else:
                done = len(tokens) == len(expected)
                assert output.finish_reason == (reason if done else None)
                assert output.stop_token_id == (tokens[-1] if done and reason == "stop" else None)
            if output.finish_reason is not None:
                del self.live[output.request_id]

    def follow_tables(self, step: ScheduledStep) -> None:
        """The tables that a worker builds from the steps are the manager's."""
        for request_id in step.gone_request_ids:
            self.tables.pop(request_id, None)
        for new in step.new_requests:
            self.tables[new.request_id] = tuple(list(ids) for ids in new.block_ids)
        for request_id, gained in step.new_block_ids.items():
            for table, ids in zip(self.tables[request_id], gained):
                table.extend(ids)
        for state in self.scheduler._tracker.running:
            for ours, theirs in zip(
                self.tables[state.request_id], self.kv.block_ids(state.request_id), strict=True
            ):
                assert len(ours) == len(theirs)
                assert all(a == b for a, b in zip(ours, theirs) if b != NULL_BLOCK)

    @invariant()
    def every_block_is_counted_once(self) -> None:
        if not hasattr(self, "kv"):
            return
        for pool in self.kv._pools:
            self.every_block_of_a_pool(pool)

    def every_block_of_a_pool(self, pool: BlockPool) -> None:
        held = Counter(
            block_id
            for entry in self.kv._entries.values()
            for table, whose in zip(entry.tables, self.kv._pool_of)
            for block_id in table
            if block_id != NULL_BLOCK and whose is pool
        )
        assert all(pool.ref_counts[b] == held[b] for b in range(1, pool.num_blocks))
        free = pool.free_blocks()
        assert sorted([*free, *held]) == list(range(1, pool.num_blocks))
        assert len(free) == pool.num_free
        is_cached = [pool.digest_of(block_id) is not None for block_id in free]
        assert is_cached == sorted(is_cached), "empty blocks come before cached ones"
        for group, cached in enumerate(pool._cached):
            for digest, block_id in cached.items():
                assert pool.digest_of(block_id) == digest
                assert pool._group_of[block_id] == group

    @invariant()
    def requests_are_where_they_belong(self) -> None:
        if not hasattr(self, "kv"):
            return
        scheduler = self.scheduler
        assert set(scheduler._tracker.requests) == set(self.live)
        self.suspended &= self.live.keys()
        assert scheduler.is_idle == (self.live.keys() == self.suspended)
        found = scheduler.num_running + scheduler.num_waiting + len(self.suspended)
        assert found == len(self.live)
        assert set(self.kv._entries) == {state.request_id for state in scheduler._tracker.running}
        assert all(state.status is RequestStatus.RUNNING for state in scheduler._tracker.running)
        keys = [state.sort_key for state in scheduler._tracker.running]
        assert keys == sorted(keys)
        stats = scheduler.stats()
        assert stats.num_free_blocks == self.kv.num_free_blocks
        assert scheduler.has_unfinished == bool(self.live)
        assert sum(stats.running_loras.values()) <= scheduler.num_running
        assert len(stats.running_loras) <= self.num_slots
        self.adapters_are_counted()

    def adapters_are_counted(self) -> None:
        users = Counter(r.lora_request.lora_int_id for r in self.live.values() if r.lora_request)
        for which in range(1, 6):
            adapter = self.adapters.find(which)
            assert users[which] == (0 if adapter is None else adapter.num_users)
        assert len(self.adapters._kept) <= max(1, self.adapters._num_kept) + 1

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.scheduler.resume(sorted(self.suspended))
        self.suspended.clear()
        for _ in range(MOST_STEPS):
            if not self.live and not self.in_flight:
                break
            self.schedule()
            if self.in_flight:
                self.land()
        assert not self.live, "something starves"
        assert self.kv.num_free_blocks == self.kv.num_blocks
        assert not self.kv._hashes
        assert not self.kv._branches
        assert self.scheduler.reset_prefix_cache()
        self.every_block_is_counted_once()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
