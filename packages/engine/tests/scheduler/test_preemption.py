"""Preemption, abort, failure and resets, with and without steps in flight."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_core.reliability import failpoints
from headrace_core.step import RequestStepResult, ScheduledStep, StepResult


def test_the_last_request_is_preempted_and_resumes_with_all_its_tokens(make_world: Any) -> None:
    world = make_world(4)
    expected = {request_id: world.add(request_id, 3, max_tokens=5) for request_id in "ab"}
    world.step()  # two blocks each: the pool is full
    assert world.step() == {"a": 1, "b": 1}
    step = world.schedule()  # the fifth token of "a" needs a third block
    assert step.num_scheduled_tokens == {"a": 1}
    assert step.gone_request_ids == ["b"]
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (1, 1)
    world.land()
    resumed = None
    while resumed is None:
        step = world.schedule()
        resumed = next((new for new in step.new_requests if new.request_id == "b"), None)
        world.land()
    assert resumed.token_ids[3:] == expected["b"][:2]
    assert resumed.num_prompt_tokens == 3
    world.run()
    assert {request_id: world.tokens(request_id) for request_id in "ab"} == expected
    assert world.outputs["b"][-1].num_preemptions == 1
    assert world.scheduler.stats().num_preemptions == 1


def test_a_preempted_request_goes_before_new_ones(make_world: Any) -> None:
    world = make_world(4)
    for request_id in "abc":
        world.add(request_id, 3, max_tokens=5)
    order = list(dict.fromkeys(r for step in world.run() for r in reversed(step)))
    assert order == ["b", "a", "c"]


def test_cached_tokens_are_those_of_the_first_scheduling(make_world: Any) -> None:
    world = make_world()
    world.add("a", 7, max_tokens=3)
    world.step()
    world.scheduler.preempt_all()
    step = world.schedule()
    assert step.new_requests[0].num_computed_tokens == 6  # its own blocks were still cached
    world.land()
    world.run()
    assert [output.num_cached_tokens for output in world.outputs["a"]] == [0, 0, 0]


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("groups", [("full",), ("full", "sliding")])
def test_a_pool_that_is_much_too_small_changes_no_text(
    make_world: Any, overlapped: bool, groups: tuple[str, ...]
) -> None:
    world = make_world(8 * len(groups), *groups, budget=6, overlapped=overlapped)
    prompts = {"a": 5, "b": 9, "c": 2, "d": 7}
    expected = {r: world.add(r, length, max_tokens=6) for r, length in prompts.items()}
    for _ in range(300):
        while world.scheduler.num_steps_in_flight < 1 + overlapped:
            step = world.scheduler.schedule()
            if step is None:
                break
            world.in_flight.append(step)
        if not world.in_flight:
            break
        world.land()
    assert {request_id: world.tokens(request_id) for request_id in prompts} == expected
    assert world.scheduler.stats().num_preemptions > 0
    assert world.kv.num_free_blocks == world.kv.num_blocks


# -- steps in flight ---------------------------------------------------------------------------


def test_a_second_step_runs_ahead_by_one_placeholder(make_world: Any) -> None:
    world = make_world(overlapped=True)
    expected = world.add("a", 3, max_tokens=3)
    assert world.schedule().num_scheduled_tokens == {"a": 3}
    assert world.schedule().num_scheduled_tokens == {"a": 1}
    assert world.scheduler.schedule() is None  # two steps are in flight
    world.land()
    assert world.tokens("a") == expected[:1]
    assert world.schedule().num_scheduled_tokens == {"a": 1}
    world.land()
    # The third and last token is in flight already: nothing more may be computed.
    assert world.scheduler.schedule() is None
    world.land()
    assert world.tokens("a") == expected
    assert not world.scheduler.has_unfinished


def test_the_context_limit_counts_placeholders(make_world: Any) -> None:
    world = make_world(overlapped=True, max_model_len=5)
    expected = world.add("a", 3, max_tokens=50)
    world.schedule()
    world.schedule()
    world.land()
    assert world.scheduler.schedule() is None
    world.land()
    assert world.tokens("a") == expected[:2]
    assert world.finish_reason("a") == "length"


def test_synchronous_scheduling_waits_for_the_result(make_world: Any) -> None:
    world = make_world()
    world.add("a", 3)
    world.schedule()
    assert world.scheduler.schedule() is None


def test_results_after_the_stop_token_are_dropped(make_world: Any) -> None:
    world = make_world(overlapped=True)
    expected = world.add("probe", [1, 2, 3], max_tokens=6)
    world.scheduler.abort(["probe"])
    world.add("a", [1, 2, 3], max_tokens=6, stop=(expected[1],))
    world.schedule()
    world.schedule()
    world.land()
    world.schedule()
    (output,) = world.land()
    assert (output.finish_reason, output.new_token_ids) == ("stop", [expected[1]])
    assert world.kv.num_free_blocks == world.kv.num_blocks
    assert world.land() == []
    assert world.tokens("a") == expected[:2]


def test_a_token_in_flight_at_preemption_is_kept_and_awaited(make_world: Any) -> None:
    world = make_world(overlapped=True)
    expected = world.add("a", 3, max_tokens=4)
    world.schedule()
    world.schedule()
    world.scheduler.preempt_all()
    assert world.kv.num_free_blocks == world.kv.num_blocks
    world.land()
    assert world.tokens("a") == expected[:1]
    assert world.scheduler.schedule() is None  # one more token is on its way
    world.land()
    assert world.tokens("a") == expected[:2]
    step = world.schedule()
    assert step.gone_request_ids == ["a"]
    assert step.new_requests[0].token_ids[3:] == expected[:2]
    world.land()
    world.run()
    assert world.tokens("a") == expected


def test_what_became_known_after_it_was_scheduled_is_cached_at_preemption(make_world: Any) -> None:
    world = make_world(overlapped=True)
    world.add("a", 3, max_tokens=4)
    world.schedule()
    world.schedule()  # fills the second block with a token that is not known yet
    world.land()
    world.scheduler.preempt_all()
    world.land()
    assert world.schedule().new_requests[0].num_computed_tokens == 4


def test_a_preempted_request_may_end_with_the_token_in_flight(make_world: Any) -> None:
    world = make_world(overlapped=True)
    expected = world.add("a", 3, max_tokens=1)
    other = world.add("b", 3, max_tokens=3)
    world.schedule()
    world.scheduler.preempt_all()
    world.land()
    assert (world.tokens("a"), world.finish_reason("a")) == (expected, "length")
    assert world.scheduler.num_waiting == 1
    world.run()
    assert world.tokens("b") == other


def test_a_late_result_is_not_taken_for_a_new_request_of_that_id(make_world: Any) -> None:
    world = make_world(overlapped=True)
    world.add("a", [1, 2, 3], max_tokens=4)
    world.schedule()
    world.schedule()
    (output,) = world.scheduler.abort(["a", "a", "nobody"])
    assert (output.request_id, output.finish_reason) == ("a", "abort")
    assert world.kv.num_free_blocks == world.kv.num_blocks
    expected = world.add("a", [7, 8, 9], max_tokens=4)
    assert world.land() == []
    step = world.schedule()
    assert (step.gone_request_ids, step.new_requests[0].token_ids) == (["a"], [7, 8, 9])
    assert world.land() == []
    world.land()
    world.run()
    assert world.tokens("a") == expected


def test_aborting_waiting_and_preempted_requests(make_world: Any) -> None:
    world = make_world(max_num_seqs=1)
    for request_id in "abc":
        world.add(request_id, 2)
    world.step()
    world.scheduler.preempt_all()
    outputs = world.scheduler.abort(["b", "a"])
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("b", "abort"), ("a", "abort")]
    assert world.scheduler.num_waiting == 1
    assert world.step() == {"c": 2}


# -- failed steps ------------------------------------------------------------------------------


@pytest.mark.parametrize("late", ["nothing", "fails", "returns garbage"])
def test_a_failed_step_ends_its_requests_and_its_cache_is_not_trusted(
    make_world: Any, late: str
) -> None:
    world = make_world(overlapped=late != "nothing", budget=6)
    world.add("a", [1, 2, 3, 4, 5, 6], max_tokens=4)
    expected = world.add("b", [1, 2, 3, 4, 5, 7], max_tokens=4)
    failed = world.schedule()
    assert failed.num_scheduled_tokens == {"a": 6}
    if late != "nothing":  # "b" builds on blocks that the failed step should have written
        assert world.schedule().num_scheduled_tokens["b"] == 2
    world.in_flight.popleft()
    world.worker.skip(failed)
    (output,) = world.scheduler.fail(failed, "out of memory")
    assert (output.request_id, output.finish_reason) == ("a", "error")
    assert output.error == "out of memory"
    assert world.kv.num_free_blocks == world.kv.num_blocks
    if late != "nothing":
        step = world.in_flight.popleft()
        world.worker.skip(step)
        garbage = {r: RequestStepResult([0]) for r in step.num_scheduled_tokens}
        if late == "fails":
            assert world.scheduler.fail(step, "out of memory") == []
        else:
            assert world.scheduler.update(step, StepResult(step.step_id, garbage)) == []
    world.add("c", [1, 2, 3, 4, 5, 6], max_tokens=2)
    assert world.step() == {"b": 6}
    world.run()
    assert world.tokens("b") == expected


@pytest.mark.parametrize("overlapped", [False, True])
def test_blocks_of_a_request_that_was_not_computed_are_found_by_nobody(
    make_world: Any, overlapped: bool
) -> None:
    """Its row was wrong: the step ran without it, and its blocks hold what was there before."""
    world = make_world(overlapped=overlapped, budget=6)
    world.add("a", [1, 2, 3, 4, 5, 6], max_tokens=4)
    expected = world.add("b", [1, 2, 3, 4, 5, 7], max_tokens=4)
    wrong = world.schedule()
    assert wrong.num_scheduled_tokens == {"a": 6}
    if overlapped:  # "b" builds on blocks that were not written
        assert world.schedule().num_scheduled_tokens["b"] == 2
    world.in_flight.popleft()
    world.worker.skip(wrong)
    found = {"a": RequestStepResult(error="its row is wrong", not_computed=True)}
    (output,) = world.scheduler.update(wrong, StepResult(wrong.step_id, found))
    assert (output.request_id, output.error) == ("a", "its row is wrong")
    if overlapped:
        step = world.in_flight.popleft()
        world.worker.skip(step)
        garbage = {r: RequestStepResult([0]) for r in step.num_scheduled_tokens}
        assert world.scheduler.update(step, StepResult(step.step_id, garbage)) == []
    assert world.step() == {"b": 6}
    world.run()
    assert world.tokens("b") == expected
    assert world.kv.num_free_blocks == world.kv.num_blocks


@pytest.mark.req("REL-01")
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("guilty", ["a", "b", "c", "nobody"])
def test_a_step_of_several_that_fails_ends_the_one_that_fails_alone(
    make_world: Any, guilty: str, overlapped: bool
) -> None:
    """Whoever is computed together with the guilty one breaks the step; the others are as ever."""
    world = make_world(overlapped=overlapped, budget=40)
    expected = {r: world.add(r, n, max_tokens=5) for r, n in (("a", 3), ("b", 9), ("c", 6))}
    broken = None if guilty == "nobody" else guilty
    alone, failures = set(), 0
    for number in range(200):
        if not world.scheduler.has_unfinished:
            break
        if number == 20:
            expected["d"] = world.add("d", 4, max_tokens=5)
        step = world.scheduler.schedule()
        if step is not None:
            world.in_flight.append(step)
        if step is not None and len(world.in_flight) == 1 and overlapped and not failures:
            continue  # two in flight when the first one fails
        landing = world.in_flight.popleft()
        ids = set(landing.num_scheduled_tokens)
        if failures and len(ids) == 1:
            alone |= ids
        fails = broken in ids if broken else failures == 0
        if fails:
            failures += 1
            world.worker.skip(landing)
            world.keep(world.scheduler.fail(landing, "it broke"))
        else:
            world.keep(world.scheduler.update(landing, _lenient(world, landing)))
    for request_id, tokens in expected.items():
        if request_id == broken:
            assert world.finish_reason(request_id) == "error"
            assert world.outputs[request_id][-1].error == "it broke"
        else:
            assert world.tokens(request_id) == tokens
            assert world.finish_reason(request_id) == "length"
    assert alone >= {"a", "b", "c"}
    assert world.kv.num_free_blocks == world.kv.num_blocks


def _lenient(world: Any, step: ScheduledStep) -> StepResult:
    """A step that was scheduled on top of a failed one reads garbage; its result is dropped."""
    try:
        return world.worker.execute(step)
    except (AssertionError, KeyError):
        garbage = {r: RequestStepResult([0]) for r in step.num_scheduled_tokens}
        return StepResult(step.step_id, garbage)


@pytest.mark.req("REL-01")
@pytest.mark.parametrize("point", ["kv.alloc", "kv.match", "engine.update", "engine.add"])
def test_what_raises_for_one_request_ends_that_one(
    make_world: Any, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failpoints, "PLAN", failpoints.parse(f"{point}=raise(match=bad)"))
    world = make_world()
    expected = {r: world.add(r, 5, max_tokens=6) for r in ("a", "b")}
    if point == "engine.add":
        with pytest.raises(RuntimeError, match="canary"):
            world.add("bad", 5)
    else:
        world.add("bad", 5)
    expected["c"] = world.add("c", 5, max_tokens=6)
    while world.scheduler.has_unfinished:
        step = world.scheduler.schedule()
        world.keep(world.scheduler.take_refused())
        world.in_flight.append(step)
        world.land()
    for request_id, tokens in expected.items():
        assert world.tokens(request_id) == tokens
    if point != "engine.add":
        [output] = world.outputs["bad"]
        assert output.finish_reason == "error"
    assert world.kv.num_free_blocks == world.kv.num_blocks


@pytest.mark.req("REL-01")
def test_what_raises_while_others_make_room_ends_that_request(make_world: Any) -> None:
    world = make_world(num_blocks=8, caching=False)
    expected = {r: world.add(r, 5, max_tokens=8) for r in ("a", "b")}
    real, preempted = world.kv.allocate, set()

    def allocate(sequence: Any, num_tokens: int, match: Any = None) -> Any:
        if sequence.request_id in preempted:
            preempted.clear()
            raise OSError("no blocks for you")
        gained = real(sequence, num_tokens, match)
        if gained is None and sequence.num_computed_tokens:
            preempted.add(sequence.request_id)
        return gained

    world.kv.allocate = allocate
    while world.scheduler.has_unfinished:
        step = world.scheduler.schedule()
        world.keep(world.scheduler.take_refused())
        if step is not None:
            world.in_flight.append(step)
            world.land()
    assert world.finish_reason("a") == "error"
    assert "no blocks for you" in world.outputs["a"][-1].error
    assert world.tokens("b") == expected["b"]
    assert world.kv.num_free_blocks == world.kv.num_blocks


@pytest.mark.req("REL-01")
def test_what_raises_while_the_rest_of_a_step_is_given_away_costs_the_rest(make_world: Any) -> None:
    world = make_world(
        budget=8, max_num_partial_prefills=2, max_long_partial_prefills=1,
        long_prefill_token_threshold=2,
    )  # fmt: skip
    expected = {r: world.add(r, 15, max_tokens=2) for r in ("l1", "l2")}
    real, asked = world.kv.allocate, []

    def allocate(sequence: Any, num_tokens: int, match: Any = None) -> Any:
        asked.append(sequence.request_id)
        if asked == ["l1", "l1"]:
            raise OSError("only once")
        return real(sequence, num_tokens, match)

    world.kv.allocate = allocate
    assert world.step() == {"l1": 4}
    world.run()
    assert {request_id: world.tokens(request_id) for request_id in expected} == expected


# -- resets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlapped", [False, True])
def test_the_prefix_cache_can_be_reset_under_running_requests(
    make_world: Any, overlapped: bool
) -> None:
    world = make_world(overlapped=overlapped)
    expected = world.add("a", 5, max_tokens=4)
    world.schedule()
    if overlapped:
        world.schedule()
    assert not world.scheduler.reset_prefix_cache()
    assert world.scheduler.reset_prefix_cache(reset_running_requests=True)
    while world.in_flight:
        world.land()
    step = world.schedule()
    assert step.new_requests[0].num_computed_tokens == 0
    world.land()
    world.run()
    assert world.tokens("a") == expected
    assert world.scheduler.reset_prefix_cache()
