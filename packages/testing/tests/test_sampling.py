"""Samples of long tails: what they hold, and what a run with them does."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_testing.sampling import KEEP, sample, todays, turn

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


def test_each_has_its_turn_within_the_days() -> None:
    for name in map(str, range(50)):
        for first in (20261130, 7):
            assert sorted(turn(name, str(first + day), 3) for day in range(3)) == [0, 1, 2]
    assert {turn(name, "20261130", 3) for name in map(str, range(50))} == {0, 1, 2}
    assert turn("x", "a text", 3) in range(3)


def test_cases_within_a_test_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TESTS", "full")
    assert todays("abcdefg", 3) == list("abcdefg")
    monkeypatch.setenv("HEADRACE_TESTS", "sampled")
    for cases, sizes in (("abcdefg", {2, 3}), ("ab", {1})):
        days = []
        for day in range(20261129, 20261132):
            monkeypatch.setenv("HEADRACE_TEST_SEED", str(day))
            days.append(todays(cases, 3))
        assert {len(today) for today in days} == sizes
        assert {case for today in days for case in today} == set(cases)


SUITES = """
    import pytest
    from headrace_testing.sampling import turns

    @turns(3)
    class Suite:
        @turns(1)
        def test_always(self):
            pass

        @pytest.mark.parametrize("a", range(2))
        def test_by_turns(self, a):
            pass

    class Wider(Suite):
        def test_of_its_own(self):
            pass

    for index in range(6):
        globals()[f"TestClass{index}"] = type(f"TestClass{index}", (Suite,), {})
        globals()[f"TestWide{index}"] = type(f"TestWide{index}", (Wider,), {})
"""


def test_classes_take_turns(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(SUITES)
    words = ("-v", "-p", "headrace_testing.sampling", "-p", "no:cacheprovider")
    monkeypatch.setenv("HEADRACE_TESTS", "full")
    pytester.runpytest_inprocess(*words).assert_outcomes(passed=42)
    monkeypatch.setenv("HEADRACE_TESTS", "sampled")
    by_turns: list[str] = []
    for day in "567":
        monkeypatch.setenv("HEADRACE_TEST_SEED", day)
        run = [line for line in pytester.runpytest_inprocess(*words).outlines if "PASSED" in line]
        assert sum("test_always" in line for line in run) == 12
        assert sum("test_of_its_own" in line for line in run) == 6
        today = [line.partition(" PASSED")[0] for line in run if "test_by_turns" in line]
        assert today
        by_turns += today
    assert len(by_turns) == len(set(by_turns)) == 24


HEAVY = """
    import pytest

    @pytest.mark.days(3)
    @pytest.mark.parametrize("a", range(2))
    def test_heavy(a):
        pass

    def test_light():
        pass
"""


def test_a_heavy_test_has_its_day(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(HEAVY)
    words = ("-p", "headrace_testing.sampling", "-p", "no:cacheprovider")
    monkeypatch.setenv("HEADRACE_TESTS", "full")
    pytester.runpytest_inprocess(*words).assert_outcomes(passed=3)
    monkeypatch.setenv("HEADRACE_TESTS", "sampled")
    passed = []
    for day in "567":
        monkeypatch.setenv("HEADRACE_TEST_SEED", day)
        passed.append(pytester.runpytest_inprocess(*words).parseoutcomes()["passed"])
    assert sorted(passed) == [1, 1, 3]


ONE = """
    from headrace_testing.sampling import turns

    @turns(7)
    class Suite:
        def test_by_turns(self):
            pass

    class TestOne(Suite):
        pass
"""


def test_a_single_class_has_every_test(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(ONE)
    monkeypatch.setenv("HEADRACE_TESTS", "sampled")
    for day in "123":
        monkeypatch.setenv("HEADRACE_TEST_SEED", day)
        run = pytester.runpytest_inprocess("-p", "headrace_testing.sampling")
        run.assert_outcomes(passed=1)


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
