"""Slow constraints are matched in threads of their own, and the others as ever."""

import threading

import pytest
from held_matching import CONSTRAINT, PATIENCE, HeldBackend, HeldStore

from headrace_core.grammar import Constraint, GrammarSpec
from headrace_engine.structured import matching
from headrace_engine.structured.budget import MatchingBudget
from headrace_engine.structured.matching import (
    QUICK_TOKENS,
    SLOW_MATCH,
    ConstraintMaker,
    fill_masks,
)
from headrace_engine.structured.matching_threads import MatchingThreads
from headrace_testing.engine.grammars import bits


@pytest.fixture
def backend():
    return HeldBackend()


@pytest.fixture
def maker(backend, monkeypatch):
    monkeypatch.setattr(
        matching, "MatchingBudget", lambda seconds, _: MatchingBudget(seconds, backend.clock)
    )
    made = ConstraintMaker(HeldStore(backend), MatchingThreads(1))
    yield made
    backend.open()
    made.close()


def slow_one(maker, backend):
    """A constraint after its first token, whose next mask is being filled in a thread."""
    made = maker.make(CONSTRAINT, [])
    backend.seconds = 2 * SLOW_MATCH
    assert fill_masks([made], allows_late=True) == []
    assert made.is_slow
    made.observe(1)
    assert backend.entered.acquire(timeout=PATIENCE)
    return made


def test_a_quick_constraint_has_no_thread(maker, backend):
    made = maker.make(CONSTRAINT, [])
    before = threading.active_count()
    for token in range(1, 9):
        assert fill_masks([made], allows_late=True) == []
        assert bits(made.words) == [token]
        made.observe(token)
        assert (made.is_slow, made.matching) == (False, None)
    assert threading.active_count() <= before  # those of earlier tests may end


def test_a_slow_one_is_matched_beside_the_steps(maker, backend):
    made = slow_one(maker, backend)
    assert fill_masks([made], allows_late=True) == [made]
    backend.open()
    made.matching.result(PATIENCE)
    assert fill_masks([made], allows_late=True) == []
    assert bits(made.words) == [2]
    assert made.is_slow


def test_others_are_filled_meanwhile(maker, backend):
    made = slow_one(maker, backend)
    backend.seconds = 0.0
    other = maker.make(CONSTRAINT, [])
    assert fill_masks([made, other], allows_late=True) == [made]
    assert bits(other.words) == [1]


def test_a_step_that_allows_nothing_late_waits(maker, backend):
    made = slow_one(maker, backend)
    timer = threading.Timer(0.0, backend.open)
    timer.start()
    assert fill_masks([made]) == []
    assert bits(made.words) == [2]
    timer.join()


def test_it_is_matched_within_the_steps_again(maker, backend):
    made = slow_one(maker, backend)
    backend.open()
    backend.seconds = 0.0
    for token in range(2, 2 + QUICK_TOKENS):
        assert made.is_slow
        fill_masks([made])
        assert bits(made.words) == [token]
        made.observe(token)
    assert (made.is_slow, made.matching) == (False, None)


def test_its_budget_ends_it_in_the_thread(maker, backend):
    made = slow_one(maker, backend)
    backend.seconds = 1.0
    backend.open()
    fill_masks([made])
    made.observe(2)
    fill_masks([made])
    assert bits(made.words) == []
    assert "matching_seconds" in made.failure
    assert (made.is_slow, made.matching) == (False, None)


def test_what_is_raised_in_the_thread_is_its_own(maker, backend):
    made = slow_one(maker, backend)
    backend.raises = ValueError("the library is broken")
    backend.open()
    fill_masks([made])
    assert bits(made.words) == []
    assert made.error == "ValueError: the library is broken"


def test_an_output_that_is_slow_to_replay_is_replayed_beside(maker, backend):
    made = maker.make(CONSTRAINT, [])
    original = made._observe

    def slow_observe(token):
        backend.now += 2 * SLOW_MATCH
        original(token)

    made._observe = slow_observe
    made.replay([1, 2, 3, 4])
    assert made.is_slow
    assert backend.entered.acquire(timeout=PATIENCE)
    assert fill_masks([made], allows_late=True) == [made]
    backend.open()
    fill_masks([made])
    assert bits(made.words) == [5]


def test_a_backend_that_keeps_the_gil_is_matched_within_the_steps(maker, backend):
    """A thread that holds the interpreter would delay every step more than once."""
    made = maker.make(Constraint(GrammarSpec("held", "choice", "[]"), ()), [])
    backend.seconds = 2 * SLOW_MATCH
    for token in (1, 2):
        assert fill_masks([made], allows_late=True) == []
        assert bits(made.words) == [token]
        made.observe(token)
    assert (made.is_slow, made.matching) == (False, None)


def test_what_has_not_begun_is_dropped_with_its_request(maker, backend):
    first = slow_one(maker, backend)
    second = maker.make(CONSTRAINT, [])
    fill_masks([second])
    second.observe(1)
    second.drop()
    assert second.matching.cancelled()
    first.drop()
    assert not first.matching.cancelled()


def test_no_thread_outlives_the_engine(backend):
    threads = MatchingThreads(1)
    seen = []
    threads.submit(lambda: seen.append(threading.current_thread())).result(PATIENCE)
    threads.close()
    threads.close()
    assert not seen[0].is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        threads.submit(lambda: None)


def test_requests_take_turns_in_a_bounded_number_of_threads():
    threads = MatchingThreads()
    before = threading.active_count()
    for _ in range(50):
        threads.submit(lambda: None).result(PATIENCE)
    assert threading.active_count() - before <= 2
    threads.close()
    assert threading.active_count() <= before
