"""What one step holds: budget, order, limits, admission, stopping."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_core.errors import ConfigError, PromptTooLong, QueueFull, RequestError
from headrace_core.kv import NULL_BLOCK
from headrace_core.step import RequestStepResult, StepResult
from headrace_engine.config import SchedulerConfig
from headrace_engine.scheduler.scheduler import Scheduler

# -- filling a step ----------------------------------------------------------------------------


def test_chunked_prefill_fills_the_budget_exactly(make_world: Any) -> None:
    world = make_world(budget=8)
    for request_id in "abc":
        world.add(request_id, 5, max_tokens=3)
    assert world.step() == {"a": 5, "b": 3}
    assert world.step() == {"a": 1, "b": 2, "c": 5}
    assert world.step() == {"a": 1, "b": 1, "c": 1}
    assert world.step() == {"b": 1, "c": 1}
    assert not world.scheduler.has_unfinished
    assert world.scheduler.schedule() is None


def test_a_long_prompt_takes_several_steps_and_yields_once(make_world: Any) -> None:
    world = make_world(budget=4)
    expected = world.add("a", 10, max_tokens=2)
    assert [world.step() for _ in range(3)] == [{"a": 4}, {"a": 4}, {"a": 2}]
    assert world.tokens("a") == expected[:1]
    world.run()
    assert world.tokens("a") == expected


def test_without_chunks_a_prompt_runs_whole_or_waits(make_world: Any) -> None:
    world = make_world(budget=10, max_model_len=10, enable_chunked_prefill=False)
    world.add("a", 6, max_tokens=2)
    world.add("b", 5, max_tokens=2)
    world.add("c", 2, max_tokens=2)  # would fit beside "a", but does not overtake
    assert world.step() == {"a": 6}
    assert world.step() == {"a": 1, "b": 5, "c": 2}


def test_no_more_requests_than_max_num_seqs(make_world: Any) -> None:
    world = make_world(max_num_seqs=2)
    for request_id in "abc":
        world.add(request_id, 2, max_tokens=2)
    assert world.step() == {"a": 2, "b": 2}
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (2, 1)
    world.step()
    assert world.step() == {"c": 2}


def test_blocks_travel_with_the_step(make_world: Any) -> None:
    world = make_world(10)
    world.add("a", [1, 2, 3], max_tokens=4)
    first = world.schedule()
    (new,) = first.new_requests
    assert (new.request_id, new.token_ids, new.num_prompt_tokens) == ("a", [1, 2, 3], 3)
    assert (new.block_ids, new.num_computed_tokens) == (([1, 2],), 0)
    assert first.new_block_ids == {}
    world.land()
    assert world.schedule().new_block_ids == {}  # the fourth token fills block 2
    world.land()
    assert world.schedule().new_block_ids == {"a": ([3],)}
    world.land()
    world.step()
    world.add("b", [9], max_tokens=1)
    assert world.schedule().gone_request_ids == ["a"]


def test_a_second_request_computes_only_what_is_new(make_world: Any) -> None:
    world = make_world()
    world.add("a", [1, 2, 3, 4, 5], max_tokens=2)
    world.run()
    world.add("b", [1, 2, 3, 4, 9, 9], max_tokens=2)
    world.add("c", [1, 2, 3, 4], max_tokens=1)
    step = world.schedule()
    assert step.num_scheduled_tokens == {"b": 2, "c": 2}
    assert [(new.num_computed_tokens, new.block_ids[0][:2]) for new in step.new_requests] == [
        (4, [1, 2]), (2, [1, 5]),
    ]  # fmt: skip
    outputs = world.land()
    assert [output.num_cached_tokens for output in outputs] == [4, 2]
    stats = world.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (5 + 6 + 4, 6)


def test_requests_of_one_step_share_their_prefix(make_world: Any) -> None:
    world = make_world()
    world.add("a", [1, 2, 3, 4, 5], max_tokens=2)
    world.add("b", [1, 2, 3, 4, 6], max_tokens=2)
    assert world.step() == {"a": 5, "b": 1}
    world.run()


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_shared_prefix_that_takes_several_steps_is_computed_once(
    make_world: Any, overlapped: bool
) -> None:
    world = make_world(budget=10, overlapped=overlapped)
    shared = list(range(24))
    for name in "abcdef":
        world.add(name, [*shared, 500 + ord(name)], max_tokens=1)
    total = 0
    while world.scheduler.has_unfinished:
        while (step := world.scheduler.schedule()) is not None:
            world.in_flight.append(step)
            total += step.num_tokens
        world.land()
    assert total == 24 + 6


# -- the size of a step ------------------------------------------------------------------------


def test_competing_prompts_run_one_after_the_other_in_smaller_steps(make_world: Any) -> None:
    world = make_world(budget=20, max_num_shared_tokens=10, max_num_seqs=4)
    world.add("a", 12, max_tokens=4)
    world.add("b", 7, max_tokens=2)
    assert [world.step() for _ in range(3)] == [{"a": 10}, {"a": 2, "b": 7}, {"a": 1, "b": 1}]
    world.run()


def test_a_request_that_is_alone_has_the_largest_step(make_world: Any) -> None:
    world = make_world(budget=20, max_num_shared_tokens=10)
    world.add("a", 25, max_tokens=1)
    assert world.run() == [{"a": 20}, {"a": 5}]


def test_decoding_requests_all_fit_into_a_small_shared_step(make_world: Any) -> None:
    world = make_world(budget=20, max_num_shared_tokens=2, max_num_seqs=4)
    for name in "abcd":
        world.add(name, 1, max_tokens=2)
    assert world.step() == {"a": 1, "b": 1, "c": 1, "d": 1}
    world.run()


def test_a_small_step_with_half_of_it_in_prompts_begins_no_further_one(make_world: Any) -> None:
    world = make_world(budget=40, max_num_shared_tokens=20, max_num_seqs=4)
    for name, length in {"a": 12, "b": 5, "c": 5, "d": 2}.items():
        world.add(name, length, max_tokens=9)
    assert world.step() == {"a": 12}
    assert world.step() == {"a": 1, "b": 5, "c": 5}
    assert world.step() == {"a": 1, "b": 1, "c": 1, "d": 2}
    world.run()


def test_large_steps_are_filled_with_prompts(make_world: Any) -> None:
    world = make_world(budget=40)
    for name, length in {"a": 24, "b": 10}.items():
        world.add(name, length, max_tokens=2)
    assert world.step() == {"a": 24, "b": 10}
    world.run()


def test_prompts_that_must_stay_whole_are_not_cut_by_the_shared_size(make_world: Any) -> None:
    world = make_world(budget=20, max_num_shared_tokens=5, enable_chunked_prefill=False)
    world.add("a", 15, max_tokens=1)
    world.add("b", 5, max_tokens=1)
    assert world.step() == {"a": 15, "b": 5}


# -- partial prefills --------------------------------------------------------------------------


def test_short_prompts_overtake_long_ones(make_world: Any) -> None:
    world = make_world(
        budget=8, max_num_partial_prefills=2, max_long_partial_prefills=1,
        long_prefill_token_threshold=6,
    )  # fmt: skip
    world.add("long1", 20, max_tokens=1)
    world.add("long2", 20, max_tokens=1)
    world.add("short", 3, max_tokens=1)
    assert world.step() == {"long1": 5, "short": 3}  # its share, and what nobody else could use
    assert world.scheduler.num_waiting == 1
    steps = world.run()
    assert all("long1" not in step for step in steps[steps.index({"long2": 8}) :])
    assert {request_id for step in steps for request_id in step} == {"long1", "long2"}


def test_a_lone_long_prompt_has_the_whole_budget(make_world: Any) -> None:
    world = make_world(budget=8, max_num_partial_prefills=2, long_prefill_token_threshold=6)
    world.add("a", 20, max_tokens=1)
    assert world.run() == [{"a": 8}, {"a": 8}, {"a": 4}]


def test_a_prompt_that_need_not_share_after_all_ends_in_this_step(make_world: Any) -> None:
    world = make_world(
        budget=8, max_num_partial_prefills=2, max_long_partial_prefills=1,
        long_prefill_token_threshold=2,
    )  # fmt: skip
    expected = {r: world.add(r, 15, max_tokens=2) for r in ("l1", "l2")}
    assert world.schedule().new_requests[0].block_ids == ([1, 2, 3, 4],)
    world.land()
    step = world.schedule()
    assert step.num_scheduled_tokens == {"l1": 7}
    assert step.new_block_ids == {"l1": ([5, 6, 7, 8],)}
    world.land()
    assert world.tokens("l1") == expected["l1"][:1]
    world.run()
    assert {request_id: world.tokens(request_id) for request_id in expected} == expected


def test_both_parts_of_a_shared_step_keep_what_the_first_sees(make_world: Any) -> None:
    world = make_world(
        100, "full", "sliding", budget=8, max_num_partial_prefills=2, max_long_partial_prefills=1,
        long_prefill_token_threshold=2,
    )  # fmt: skip
    for request_id in ("l1", "l2"):
        world.add(request_id, 30, max_tokens=2)
    assert [world.step(), world.step()] == [{"l1": 8}, {"l1": 8}]
    # Scheduled as 8..12 and 12..16. The query at 8 sees keys from 3 on: of block 1 the second half.
    assert [b == NULL_BLOCK for b in world.kv.block_ids("l1")[1]] == [True] + [False] * 7
    world.run()


def test_as_many_partial_prefills_as_allowed(make_world: Any) -> None:
    world = make_world(
        budget=12, max_num_partial_prefills=3, max_long_partial_prefills=3,
        long_prefill_token_threshold=2,
    )  # fmt: skip
    for request_id in "abcd":
        world.add(request_id, 10, max_tokens=1)
    assert world.step() == {"a": 4, "b": 4, "c": 4}
    assert world.step() == {"a": 4, "b": 4, "c": 4}
    assert world.step() == {"a": 2, "b": 2, "c": 2, "d": 6}


def test_overtaken_requests_keep_their_order(make_world: Any) -> None:
    world = make_world(
        budget=8, max_num_partial_prefills=2, max_long_partial_prefills=1,
        long_prefill_token_threshold=5,
    )  # fmt: skip
    for request_id in ("l1", "l2", "l3", "l4"):
        world.add(request_id, 30, max_tokens=1)
    for _ in range(2):
        world.step()
        waiting = [state.request_id for state in world.scheduler._tracker.waiting._states]
        assert waiting == ["l2", "l3", "l4"]
    order = list(dict.fromkeys(request_id for step in world.run() for request_id in step))
    assert order == ["l1", "l2", "l3", "l4"]


# -- priority ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", ["a", "b", "c", "d"]), ("priority", ["d", "b", "c", "a"])]
)
def test_order_with_one_slot(make_world: Any, policy: str, order: list[str]) -> None:
    world = make_world(max_num_seqs=1, policy=policy)
    for request_id, priority in (("a", 5), ("b", 1), ("c", 1), ("d", -2)):
        world.add(request_id, 2, max_tokens=2, priority=priority)
    steps = world.run()
    assert list(dict.fromkeys(request_id for step in steps for request_id in step)) == order


def test_the_lowest_priority_is_preempted(make_world: Any) -> None:
    world = make_world(4, policy="priority", max_model_len=9)
    expected = {
        request_id: world.add(request_id, 3, max_tokens=5, priority=priority)
        for request_id, priority in (("urgent", 0), ("idle", 9))
    }
    assert world.step() == {"urgent": 3, "idle": 3}
    world.add("normal", 3, max_tokens=5, priority=4)
    world.step()
    world.step()
    assert world.outputs["urgent"][-1].num_preemptions == 0
    assert world.scheduler.stats().num_preemptions == 1
    steps = world.run()
    order = list(dict.fromkeys(request_id for step in steps for request_id in step))
    assert order == ["urgent", "normal", "idle"]
    assert {request_id: world.tokens(request_id) for request_id in expected} == expected
    assert world.outputs["idle"][-1].num_preemptions >= 1


# -- admission ---------------------------------------------------------------------------------


def test_requests_that_can_never_run_are_refused(make_world: Any) -> None:
    world = make_world(5, max_model_len=20)
    world.add("a", 2)
    with pytest.raises(RequestError, match="request_id = 'a'"):
        world.add("a", 2)
    with pytest.raises(RequestError, match="prompt: must hold at least one token"):
        world.add("b", [])
    with pytest.raises(PromptTooLong, match=r"requested 21 tokens .20 in the prompt, 1 in"):
        world.add("b", 20)
    with pytest.raises(RequestError, match=r"max_tokens = 9 needs 11 tokens of KV cache; .* 10$"):
        world.add("b", 3, max_tokens=9)
    world.add("b", 3, max_tokens=8)
    world.run()
    world.add("a", 2)  # its id is free again


def test_a_queue_without_a_limit_is_never_full(make_world: Any) -> None:
    world = make_world(max_num_seqs=1)
    for number in range(16_400):
        world.add(str(number), 2, max_tokens=1)
    assert world.scheduler.stats().num_requests_waiting == 16_400


def test_a_full_queue_says_when_to_come_again(make_world: Any) -> None:
    world = make_world(max_num_seqs=1, max_queued_requests=2)
    world.add("a", 2, max_tokens=1)
    world.add("b", 2, max_tokens=1)
    with pytest.raises(QueueFull, match="2 requests wait already") as first:
        world.add("c", 2)
    assert first.value.retry_after == 1.0
    for request_id in "cdef":
        world.step()
        world.now += 5.0
        world.add(request_id, 2, max_tokens=1)
    with pytest.raises(QueueFull) as second:
        world.add("g", 2)
    assert second.value.retry_after == 5.0
    world.now += 1e6
    with pytest.raises(QueueFull) as stuck:
        world.add("g", 2)
    assert stuck.value.retry_after == 60.0


def test_limits_must_be_resolved(make_world: Any) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.max_num_seqs = None"):
        Scheduler(SchedulerConfig(max_num_batched_tokens=8), make_world().kv, max_model_len=8)


# -- stopping ----------------------------------------------------------------------------------


def test_a_stop_token_ends_the_output_and_stays_in_it(make_world: Any) -> None:
    world = make_world()
    expected = world.add("probe", [1, 2, 3], max_tokens=6)
    world.add("a", [1, 2, 3], max_tokens=6, stop=(expected[2],))
    world.run()
    assert world.tokens("a") == expected[:3]
    last = world.outputs["a"][-1]
    assert (last.finish_reason, last.stop_token_id) == ("stop", expected[2])
    assert world.finish_reason("probe") == "length"
    assert world.outputs["probe"][-1].stop_token_id is None


@pytest.mark.parametrize(
    ("min_tokens", "max_tokens", "length", "reason"),
    [(0, 6, 3, "stop"), (3, 6, 3, "stop"), (4, 6, 6, "length"), (0, 3, 3, "stop")],
)
def test_min_tokens_and_limits(
    make_world: Any, min_tokens: int, max_tokens: int, length: int, reason: str
) -> None:
    world = make_world()
    expected = world.add("probe", [1, 2, 3], max_tokens=6)
    world.add("a", [1, 2, 3], max_tokens=max_tokens, min_tokens=min_tokens, stop=(expected[2],))
    world.run()
    assert (len(world.tokens("a")), world.finish_reason("a")) == (length, reason)


def test_the_context_ends_the_output(make_world: Any) -> None:
    world = make_world(max_model_len=7)
    world.add("a", 4, max_tokens=50)
    world.run()
    assert (len(world.tokens("a")), world.finish_reason("a")) == (3, "length")


# -- prompt log-probabilities ------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True])
def test_prompt_logprobs_are_collected_over_chunks(make_world: Any, warm: bool) -> None:
    world = make_world(budget=4)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    if warm:
        world.add("first", prompt, max_tokens=1)
        world.run()
    world.add("a", prompt, max_tokens=2, prompt_logprobs=0)
    assert [world.step() for _ in range(3)] == [{"a": 4}, {"a": 4}, {"a": 1}]
    (output,) = world.outputs["a"]
    assert output.num_cached_tokens == 0
    assert [entry.token_ids[0] for entry in output.prompt_logprobs] == prompt[1:]
    world.run()
    assert world.outputs["a"][-1].prompt_logprobs is None


def test_prompt_logprobs_start_again_after_a_preemption(make_world: Any) -> None:
    world = make_world(budget=4)
    prompt = list(range(10))
    world.add("a", prompt, max_tokens=2, prompt_logprobs=0)
    world.step()
    world.step()
    world.scheduler.preempt_all()
    world.run()
    first, second = world.outputs["a"]
    assert [entry.token_ids[0] for entry in first.prompt_logprobs] == prompt[1:]
    assert second.prompt_logprobs is None


def test_prompt_logprobs_of_a_single_token_are_empty(make_world: Any) -> None:
    world = make_world()
    world.add("a", [3], max_tokens=1, prompt_logprobs=0)
    world.run()
    assert world.outputs["a"][0].prompt_logprobs == []


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (RequestStepResult(error="logits are not finite"), "logits are not finite"),
        (None, "returned no result"),
        (RequestStepResult([]), "returned 0 tokens instead of 1"),
        (RequestStepResult([1, 2]), "returned 2 tokens instead of 1"),
    ],
)
def test_one_request_fails_alone(
    make_world: Any, result: RequestStepResult | None, message: str
) -> None:
    world = make_world()
    world.add("bad", 3)
    expected = world.add("good", 3)
    step = world.schedule()
    results = world.worker.execute(step)
    del results.requests["bad"]
    if result is not None:
        results.requests["bad"] = result
    world.in_flight.clear()
    bad, good = world.keep(world.scheduler.update(step, results))
    assert (bad.request_id, bad.finish_reason, bad.new_token_ids) == ("bad", "error", [])
    assert message in bad.error
    assert good.finish_reason is None
    world.run()
    assert world.tokens("good") == expected
    assert world.kv.num_free_blocks == world.kv.num_blocks


def test_steps_end_in_order(make_world: Any) -> None:
    world = make_world(overlapped=True)
    world.add("a", 3)
    first, second = world.schedule(), world.schedule()
    with pytest.raises(RuntimeError, match="step 1 has ended, but 0 is the oldest"):
        world.scheduler.update(second, StepResult(1, {}))
    with pytest.raises(RuntimeError, match="result of step 1 given for step 0"):
        world.scheduler.update(first, StepResult(1, {}))
    with pytest.raises(RuntimeError, match="step 1 has ended"):
        world.scheduler.fail(second, "")


@pytest.mark.req("REL-22")
def test_owners_share_by_tokens(make_world: Any) -> None:
    """One asks for 20 times as much; as long as the other waits, each gets half."""
    world = make_world(1000, max_num_seqs=4, policy="fair")
    for number in range(60):
        world.add(f"a{number}", 3, max_tokens=5, owner="a")
    for number in range(12):
        world.add(f"b{number}", 3, max_tokens=5, owner="b")
    counts = {"a": 0, "b": 0}
    while any(state.request.owner == "b" for state in world.scheduler._tracker.requests.values()):
        for request_id, number in world.step().items():
            counts[request_id[0]] += number
    assert 0.9 < counts["a"] / counts["b"] < 1.1


# -- statistics --------------------------------------------------------------------------------


def test_stats_count_what_happened(make_world: Any) -> None:
    world = make_world(10, budget=4)
    world.add("a", 6, max_tokens=3)
    world.add("b", 2, max_tokens=1)
    world.now = 3.0
    world.step()
    stats = world.scheduler.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (1, 1)
    assert (stats.num_blocks, stats.num_free_blocks, stats.kv_cache_usage) == (10, 8, 0.2)
    assert (stats.prompt_tokens, stats.generation_tokens) == (0, 0)
    world.step()
    stats = world.scheduler.stats(drain=True)
    assert (stats.prompt_tokens, stats.generation_tokens) == (8, 2)
    assert (stats.num_steps, stats.iteration_tokens, stats.step_tokens) == (2, 8, [4, 4])
    world.run()
    stats = world.scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (8, 4)
    assert (stats.num_steps, stats.step_tokens) == (4, [1, 1])
    assert world.outputs["a"][0].queued_ts == 0.0
    assert world.outputs["a"][0].scheduled_ts == 3.0
