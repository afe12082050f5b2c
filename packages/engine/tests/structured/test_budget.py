"""The cost of matching a constraint is bounded, in a step and in all."""

import gc
import time

import numpy as np
import pytest

from headrace_core.grammar import Constraint, GrammarSpec, Vocabulary
from headrace_engine.structured import matching
from headrace_engine.structured.backends import guidance
from headrace_engine.structured.backends.guidance import GuidanceBackend
from headrace_engine.structured.budget import (
    SECONDS_PER_TOKEN,
    MatchingBudget,
    MatchingClock,
)
from headrace_engine.structured.matching import ConstraintMaker, fill_masks
from headrace_engine.structured.store import GrammarStore
from headrace_testing.engine.grammars import BYTES, bits

END = 256
AMBIGUOUS = 'root ::= s\ns ::= s s | "a" | s s s | ""'


class Clock:
    """Shows what it is told."""

    now = 0.0

    def __call__(self):
        return self.now


def spend(budget, clock, seconds):
    with budget.one_token():
        clock.now += seconds


def test_what_is_free_for_each_token_is_not_charged():
    clock = Clock()
    budget = MatchingBudget(0.01, clock)
    for _ in range(1000):
        spend(budget, clock, SECONDS_PER_TOKEN * 0.9)
    assert not budget.exceeded


def test_what_goes_beyond_adds_up():
    clock = Clock()
    budget = MatchingBudget(0.0105, clock)
    for _ in range(10):
        assert not budget.exceeded
        spend(budget, clock, SECONDS_PER_TOKEN + 0.001)
    assert not budget.exceeded
    spend(budget, clock, SECONDS_PER_TOKEN + 0.001)
    assert budget.exceeded


class Leftover:
    """Whose collection takes a while of processor time."""

    seconds = 0.05

    def __init__(self):
        self.itself = self

    def __del__(self):
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass


@pytest.mark.parametrize("owed", [False, True])
def test_a_collection_of_what_others_left_is_not_charged(owed):
    """``owed``: the same time of the matching itself is."""
    clock = MatchingClock()
    try:
        budget = MatchingBudget(Leftover.seconds / 2, clock)
        left = Leftover()
        with budget.one_token():
            if owed:
                left.__del__()
            del left
            gc.collect()
        assert budget.exceeded == owed
    finally:
        clock.close()
    assert not [call for call in gc.callbacks if getattr(call, "__self__", None) is clock]


def test_a_step_makes_a_bounded_number_of_items():
    """Tokens of many letters make one step of an ambiguous grammar costly."""
    vocabulary = Vocabulary([*BYTES, *(b"a" * n for n in range(2, 17))])
    spec = GrammarSpec("guidance", "grammar", AMBIGUOUS)
    matcher = GuidanceBackend(vocabulary).compile(spec).matcher()
    mask = np.zeros((1, vocabulary.num_words), np.int32)
    length = 0
    while length < 150:
        matcher.fill_bitmask(mask, 0)
        if not mask.any():
            break
        assert matcher.advance([ord("a")])
        length += 1
    assert 10 < length < 150, "the library gave up, neither at once nor late"


def test_a_token_behind_a_slow_mask_is_taken_the_same(monkeypatch):
    """By a thread of the library, which leaves the interpreter to others."""
    vocabulary = Vocabulary([*BYTES, b"ab", b"ba"])
    grammar = GuidanceBackend(vocabulary).compile(GrammarSpec("guidance", "grammar", AMBIGUOUS))
    plain, slow = grammar.matcher(), grammar.matcher()
    masks = np.zeros((2, vocabulary.num_words), np.int32)

    def fill():
        monkeypatch.setattr(guidance, "SLOW_MASK", 1e9)
        plain.fill_bitmask(masks, 0)
        monkeypatch.setattr(guidance, "SLOW_MASK", -1.0)
        slow.fill_bitmask(masks, 1)
        assert (masks[0] == masks[1]).all()
        assert plain.complete == slow.complete

    for _ in range(9):
        fill()
        assert not slow.advance([ord("z")]), "not in the mask"
        fill()
        assert (plain.advance([ord("a")]), slow.advance([ord("a")])) == (True, True)
    fill()
    for matcher in (plain, slow):
        matcher.roll_back(3)
    fill()
    assert slow.advance([ord("a"), ord("a"), ord("a")])
    assert plain.advance([ord("a"), ord("a"), ord("a")])
    fill()
    assert (plain.failure, slow.failure) == ("", "")


@pytest.fixture
def store():
    made = GrammarStore(lambda: Vocabulary([*BYTES, b"</s>"], frozenset({END})), 1 << 26)
    yield made
    made.close()


def make(store, regex):
    return ConstraintMaker(store).make(
        Constraint(GrammarSpec("guidance", "regex", regex), (END,)), []
    )


def test_beyond_its_budget_a_constraint_allows_nothing_and_others_go_on(store):
    slow, other = make(store, "a+"), make(store, "b+")
    clock = Clock()
    slow.budget = MatchingBudget(0.001, clock)
    fill_masks([slow, other])
    assert (bits(slow.words), bits(other.words)) == ([97], [98])
    assert slow.failure is None
    spend(slow.budget, clock, 1.0)
    fill_masks([slow, other])
    assert (bits(slow.words), bits(other.words)) == ([], [98])
    assert "matching_seconds" in slow.failure
    assert other.failure is None


def test_who_is_slow_in_a_group_is_found_out(store, monkeypatch):
    rows = [make(store, regex) for regex in ("a+", "b+")]
    monkeypatch.setattr(matching, "SLOW_FILL", -1.0)
    fill_masks(rows)
    assert [row.alone for row in rows] == [True, True]
    monkeypatch.setattr(matching, "SLOW_FILL", 1e9)
    fill_masks(rows)
    assert [row.alone for row in rows] == [False, False]
    assert [bits(row.words) for row in rows] == [[97], [98]]
