"""Room for guesses in steps."""

from __future__ import annotations

from collections import deque

from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_core.step import ScheduledStep
from headrace_engine.config import SchedulerConfig
from headrace_engine.kv.manager import PagedKVCacheManager
from headrace_engine.scheduler.draft_limits import DraftLimits
from headrace_engine.scheduler.scheduler import Scheduler
from headrace_testing.engine.kv_managers import cache_config
from headrace_testing.engine.schedulers import CheckingWorker, expected_tokens

VOCAB_SIZE = 1000


class World:
    """Steps of up to ``budget`` tokens; guesses are as right as ``right`` says."""

    def __init__(
        self, drafts: DraftLimits, budget: int = 64, num_blocks: int = 200, right: int = 9
    ) -> None:
        cache = cache_config(num_blocks + 1, "full", block_size=2)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=16, encoder_share=0.0),
            PagedKVCacheManager(cache, True, 100, budget),
            max_model_len=100,
            async_scheduling=True,
            drafts=drafts,
        )
        self.worker = CheckingWorker(cache, VOCAB_SIZE, lambda request_id, count: (9, right))
        self.in_flight: deque[ScheduledStep] = deque()
        self.tokens: dict[str, list[int]] = {}

    def add(self, request_id: str, length: int, max_tokens: int) -> list[int]:
        prompt = [ord(request_id) * 100 + i for i in range(length)]
        self.tokens[request_id] = []
        self.scheduler.add(
            CoreRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=max_tokens),
                stop_token_ids=frozenset(),
                max_tokens=max_tokens,
                arrival_time=0.0,
            )
        )
        return expected_tokens(prompt, max_tokens, VOCAB_SIZE)

    def step(self) -> ScheduledStep | None:
        """Schedule one, and end the oldest of two."""
        step = self.scheduler.schedule()
        if step is not None:
            self.in_flight.append(step)
        if len(self.in_flight) > 1 or step is None:
            done = self.in_flight.popleft()
            for output in self.scheduler.update(done, self.worker.execute(done)):
                self.tokens[output.request_id] += output.new_token_ids
        return step

    def run(self) -> list[dict[str, int]]:
        """The guesses of each step, until nothing is left."""
        found = []
        while self.scheduler.has_unfinished:
            step = self.step()
            found += [] if step is None else [step.num_drafts]
        return found


def test_right_guesses_save_steps() -> None:
    world = World(DraftLimits(4))
    expected = world.add("a", 5, 21)
    steps = world.run()
    assert world.tokens["a"] == expected
    assert len(steps) == 5
    stats = world.scheduler.stats()
    assert stats.num_accepted_per_position == [4, 4, 4, 4]


def test_wrong_guesses_cost_no_token() -> None:
    world = World(DraftLimits(4), right=0)
    expected = world.add("a", 5, 21)
    world.run()
    assert world.tokens["a"] == expected
    assert world.scheduler.stats().num_accepted_per_position == [0, 0, 0, 0]


def test_guesses_leave_room_for_prompts() -> None:
    world = World(DraftLimits(32), budget=64)
    expected = {name: world.add(name, 1, 60) for name in "abcdefgh"}
    for _ in range(3):
        world.step()
    expected["x"] = world.add("x", 40, 2)
    step = world.step()
    assert step is not None
    assert step.num_scheduled_tokens["x"] >= 40
    assert set(step.num_drafts.values()) == {2}
    world.run()
    assert world.tokens == expected


def test_a_full_cache_has_none() -> None:
    world = World(DraftLimits(8), num_blocks=12)
    expected = {name: world.add(name, 4, 6) for name in "ab"}
    world.run()
    assert world.tokens == expected
    assert world.scheduler.stats().num_preemptions == 0


def test_more_requests_than_guesses_are_for() -> None:
    world = World(DraftLimits(4, most_running=1))
    expected = {"a": world.add("a", 3, 8), "b": world.add("b", 3, 20)}
    steps = world.run()
    assert world.tokens == expected
    alone = [index for index, drafts in enumerate(steps) if drafts]
    assert alone
    assert all(set(steps[index]) == {"b"} for index in alone)
