"""Samples of long tails: what they hold, and what a run with them does."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_testing.sampling import KEEP, sample

pytest_plugins = ["pytester"]

CASES = [{"dtype": d, "size": s, "heads": h}
         for d, s, h in itertools.product("abc", range(40), range(5))]  # fmt: skip


@given(st.text())
def test_every_value_is_in_a_sample(seed: str) -> None:
    chosen = sample(CASES, keep=24, seed=seed)
    assert chosen == sorted(set(chosen))
    assert {CASES[i]["size"] for i in chosen} == set(range(40))
    assert {CASES[i]["heads"] for i in chosen} == set(range(5))
    assert {CASES[i]["dtype"] for i in chosen} == set("abc")
    assert len(chosen) < 48  # 40 sizes, and at most one case for each other value
    assert chosen == sample(CASES, keep=24, seed=seed)


def test_seeds_choose_otherwise_and_reach_every_case() -> None:
    reached: set[int] = set()
    for day in range(300):
        reached.update(sample(CASES, keep=24, seed=str(day)))
    assert reached == set(range(len(CASES)))


def test_a_short_tail_is_whole() -> None:
    assert sample(CASES[:24], keep=24, seed="x") == list(range(24))
    assert len(sample([{}] * 100, keep=24, seed="x")) == 24


def test_cases_that_take_turns() -> None:
    """One a day, whatever the values: each has its turn."""
    days = [sample(CASES[:3], keep=1, seed=str(day), every_value=False) for day in range(30)]
    assert {len(chosen) for chosen in days} == {1}
    assert {index for [index] in days} == {0, 1, 2}


FILE = """
    import pytest

    @pytest.mark.parametrize("a", range(10))
    @pytest.mark.parametrize("b", range(10))
    def test_many(a, b):
        pass

    @pytest.mark.parametrize("a", range(5))
    def test_few(a):
        pass

    @pytest.mark.keep(3)
    @pytest.mark.parametrize("a", range(2))
    @pytest.mark.parametrize("b", range(5))
    def test_long(a, b):
        pass

    @pytest.mark.keep(1)
    class TestOfOneKind:
        kinds = ("x",)

        @pytest.mark.parametrize("a", range(5))
        @pytest.mark.parametrize("kind", ["x", "y", "z"])
        def test_served(self, kind, a):
            if kind not in self.kinds:
                pytest.skip("another kind")
"""


def test_a_run_with_samples(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(FILE)
    monkeypatch.setenv("HEADRACE_TEST_SEED", "7")
    words = ("-p", "headrace_testing.sampling", "-p", "no:cacheprovider")
    monkeypatch.setenv("HEADRACE_TESTS", "full")
    pytester.runpytest_subprocess(*words).assert_outcomes(passed=120, skipped=10)
    monkeypatch.setenv("HEADRACE_TESTS", "sampled")
    done = pytester.runpytest_subprocess(*words)
    passed, left_out = done.parseoutcomes()["passed"], done.parseoutcomes()["deselected"]
    assert passed + left_out == 130
    assert "skipped" not in done.parseoutcomes()
    served = 5  # each a, of the kind that is served
    many, few, long = range(KEEP, KEEP + 1), 5, range(5, 7)  # 10 + 10 values need at most 19 cases
    assert many[0] + few + long[0] + served <= passed <= many[-1] + few + long[-1] + served
    done.stdout.fnmatch_lines("*HEADRACE_TEST_SEED=7*")
    monkeypatch.setenv("HEADRACE_TEST_KEEP", "1")
    passed = pytester.runpytest_subprocess(*words).parseoutcomes()["passed"]
    assert 10 + few + long[0] + served <= passed <= 19 + few + long[-1] + served
