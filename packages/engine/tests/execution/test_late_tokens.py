"""A worker does not wait for a mask that takes long: its other rows go on, and the token comes later."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from held_matching import CONSTRAINT, PATIENCE, HeldBackend, HeldStore

from headrace_core.sampling.params import SamplingParams
from headrace_core.step import NewRequest, StepResult
from headrace_engine.structured import matching
from headrace_engine.structured.budget import MatchingBudget
from headrace_engine.structured.matching import SLOW_MATCH
from headrace_engine.worker.settings import SamplingSettings

PROMPT, OTHER = [3, 1, 4, 1, 5], [7, 7, 2]
SETTINGS = [
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=1.3, seed=11, top_p=0.95, logprobs=2),
    SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.2, logit_bias={4: 1.5}),
]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldBackend]:
    made = HeldBackend(width=5)
    made.seconds = 2 * SLOW_MATCH
    monkeypatch.setattr(
        matching, "MatchingBudget", lambda seconds, _: MatchingBudget(seconds, made.clock)
    )
    yield made
    made.open()


def constrained(h: Any, params: SamplingParams | None = None, **fields: Any) -> NewRequest:
    new: NewRequest = h.new("slow", PROMPT, params, **fields)
    new.request.constraint = CONSTRAINT
    return new


def until_late(h: Any, result: StepResult) -> Any:
    """Empty steps until the late token is there."""
    while "slow" not in result.late:
        result = h.step({}, allows_late=True)
        assert result.requests == {}
    return result.late["slow"]


def late_run(h: Any, backend: HeldBackend, count: int, params: Any) -> list[Any]:
    """Results of ``count`` tokens, each of which is late but the first."""
    first = h.step({"slow": 5}, [constrained(h, params)], allows_late=True).requests["slow"]
    assert (len(first.token_ids), first.is_slow) == (1, True)
    found = [first]
    while len(found) < count:
        assert backend.entered.acquire(timeout=PATIENCE)
        result = h.step({"slow": 1}, allows_late=True)
        assert (result.requests["slow"].token_ids, result.requests["slow"].is_slow) == ([], True)
        assert result.late == {}
        backend.let_one()
        found.append(until_late(h, result))
    return found


@pytest.mark.parametrize("params", SETTINGS, ids=["greedy", "seeded", "penalised"])
def test_late_tokens_are_those_that_would_have_come_in_time(
    harness: Any, backend: HeldBackend, params: SamplingParams
) -> None:
    h = harness(sampling=SamplingSettings(grammars=HeldStore(backend)))
    late = late_run(h, backend, 6, params)
    h.step({}, gone=["slow"])
    in_time = []
    backend.seconds = 0.0
    for step in range(6):
        new = [] if step else [constrained(h, params)]
        in_time.append(h.step({"slow": 1 if step else 5}, new, allows_late=True).requests["slow"])
    assert [r.token_ids for r in late] == [r.token_ids for r in in_time]
    assert [r.logprobs for r in late] == [r.logprobs for r in in_time]


def test_neighbours_get_their_tokens_meanwhile(harness: Any, backend: HeldBackend) -> None:
    h = harness(sampling=SamplingSettings(grammars=HeldStore(backend)))
    new = [constrained(h), h.new("other", OTHER)]
    first = h.step({"slow": 5, "other": 3}, new, allows_late=True)
    tokens = list(first.requests["other"].token_ids)
    result = h.step({"slow": 1, "other": 1}, allows_late=True)
    assert result.requests["slow"].token_ids == []
    tokens += result.requests["other"].token_ids
    for _ in range(6):
        result = h.step({"other": 1}, allows_late=True)
        assert result.late == {}
        tokens += result.requests["other"].token_ids
    assert tokens == h.model.dense_greedy(OTHER, 8)
    backend.open()
    while "slow" not in result.late:
        result = h.step({"other": 1}, allows_late=True)
        assert list(result.requests) == ["other"]
    assert len(result.late["slow"].token_ids) == 1


def test_a_step_that_allows_nothing_late_has_all_tokens(harness: Any, backend: HeldBackend) -> None:
    h = harness(sampling=SamplingSettings(grammars=HeldStore(backend)))
    h.step({"slow": 5}, [constrained(h)])
    backend.open()
    assert len(h.step({"slow": 1}).requests["slow"].token_ids) == 1


def test_scheduled_behind_its_late_token_it_is_waited_for(
    harness: Any, backend: HeldBackend
) -> None:
    h = harness(sampling=SamplingSettings(grammars=HeldStore(backend)))
    params = SamplingParams(temperature=0.0, logprobs=2)
    straight = late_run(h, backend, 3, params)
    h.step({}, gone=["slow"])
    h.step({"slow": 5}, [constrained(h, params)], allows_late=True)
    assert h.step({"slow": 1}, allows_late=True).requests["slow"].token_ids == []
    backend.open()
    result = h.step({"slow": 1})
    assert result.late["slow"].token_ids == straight[1].token_ids
    assert result.requests["slow"].token_ids == straight[2].token_ids


def test_who_is_gone_is_forgotten(harness: Any, backend: HeldBackend) -> None:
    h = harness(sampling=SamplingSettings(grammars=HeldStore(backend)))
    h.step({"slow": 5}, [constrained(h)], allows_late=True)
    h.step({"slow": 1}, allows_late=True)
    assert h.step({}, gone=["slow"], allows_late=True).late == {}
    backend.open()
    backend.seconds = 0.0
    again = h.step({"slow": 5}, [constrained(h)], allows_late=True)
    assert (len(again.requests["slow"].token_ids), again.late) == (1, {})


def test_resumed_after_a_preemption_while_late(harness: Any, backend: HeldBackend) -> None:
    h = harness(sampling=SamplingSettings(grammars=HeldStore(backend)))
    params = SETTINGS[1]
    straight = late_run(h, backend, 3, params)
    h.step({}, gone=["slow"])
    tokens = h.step({"slow": 5}, [constrained(h, params)], allows_late=True).requests["slow"]
    h.step({"slow": 1}, allows_late=True)
    backend.open()
    again = constrained(h, params, output=tokens.token_ids)
    result = h.step({"slow": 6}, [again], gone=["slow"], allows_late=True)
    assert result.late == {}
    assert result.requests["slow"].token_ids == straight[1].token_ids


def test_beyond_its_budget_it_ends_alone(harness: Any, backend: HeldBackend) -> None:
    h = harness(sampling=SamplingSettings(grammars=HeldStore(backend)))
    h.step({"slow": 5, "other": 3}, [constrained(h), h.new("other", OTHER)], allows_late=True)
    backend.seconds = 1.0
    result = h.step({"slow": 1, "other": 1}, allows_late=True)
    backend.open()
    until_late(h, result)
    result = h.step({"slow": 1, "other": 1}, allows_late=True)
    assert "matching_seconds" in result.requests["slow"].dead_end
    assert result.requests["other"].token_ids


def test_what_is_raised_in_the_thread_ends_it_alone(harness: Any, backend: HeldBackend) -> None:
    h = harness(sampling=SamplingSettings(grammars=HeldStore(backend)))
    h.step({"slow": 5, "other": 3}, [constrained(h), h.new("other", OTHER)], allows_late=True)
    result = h.step({"slow": 1, "other": 1}, allows_late=True)
    backend.raises = ValueError("the library is broken")
    backend.open()
    assert until_late(h, result).error == "ValueError: the library is broken"


def test_no_thread_outlives_the_worker(harness: Any, backend: HeldBackend) -> None:
    h = harness(sampling=SamplingSettings(grammars=HeldStore(backend)))
    before = set(threading.enumerate())
    h.step({"slow": 5}, [constrained(h)], allows_late=True)
    assert backend.entered.acquire(timeout=PATIENCE)
    assert set(threading.enumerate()) - before
    backend.open()
    h.worker.close()
    assert not set(threading.enumerate()) - before
