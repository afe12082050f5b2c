"""A pytest plugin that shortens long tails: of a test with many cases it keeps a sample.

Switched on by ``HEADRACE_TESTS=sampled``; without it every case runs. The sample is drawn by a seed
that the header prints: ``HEADRACE_TEST_SEED``, else the day, so that all cases get their turn within
days and a failure can be repeated. Every value of every parameter is in the sample at least once.
``@pytest.mark.keep(4)``, on a test, a class or a module, has it shortened where it has more than four cases:
for tests whose cases take long; with ``every_value=False`` to just so many, if a case takes most of a
minute. ``HEADRACE_TEST_KEEP`` is such a number for a run.

``@pytest.mark.days(3)`` has a test run every third day, with all that is kept of its cases: for tests that
take most of a minute, beside others that show the same feature with every change.

Many classes inherit the tests of a suite. :func:`turns` on the suite has a share of the classes run each of
its tests: within as many days each class has had each test.

A case that its class skips shows no value: it is none of those that are sampled. Parameter ``dtype`` has
the values that the class lists in ``dtypes``, where it has such a list, and others alike.
"""

from __future__ import annotations

import datetime
import os
import random
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

KEEP = 24
"""Cases of one test that are few enough to run all, unless said otherwise."""
TURNS = "__headrace_turns__"
"""Attribute of a suite, and of a test of a suite; not a mark, so that suites need no plug-in."""

Case = TypeVar("Case")
Suite = TypeVar("Suite", bound=Callable[..., Any])


def turns(days: int) -> Callable[[Suite], Suite]:
    """Have the classes that inherit a suite take turns in sampled runs: each has each test once in ``days``.

    On a test of the suite it goes before the suite's own: ``@turns(1)`` is for what every class shows every
    day. Each test is run of one class at least. Tests that a class defines for itself are no part of it.
    """

    def decorate(suite: Suite) -> Suite:
        setattr(suite, TURNS, days)
        return suite

    return decorate


def pytest_configure(config: pytest.Config) -> None:
    """Fix the seed before the processes of pytest-xdist start: they inherit it."""
    os.environ.setdefault("HEADRACE_TEST_SEED", f"{datetime.date.today():%Y%m%d}")
    config.addinivalue_line(
        "markers", "keep(cases): a sample of so many is enough, as its cases take long"
    )
    config.addinivalue_line("markers", "days(number): it has its turn every so many days")


def pytest_report_header(config: pytest.Config) -> str:
    """Say what is left out and how to run it."""
    if not _is_on():
        return "long tails: whole"
    seed = os.environ["HEADRACE_TEST_SEED"]
    return f"long tails: sampled, HEADRACE_TEST_SEED={seed}; HEADRACE_TESTS=full runs them whole"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the sample does not hold."""
    if not _is_on():
        return
    tests: dict[str, list[pytest.Item]] = {}
    shown = [item for item in items if not _is_skipped(item)]
    waiting = _waiting(shown, os.environ["HEADRACE_TEST_SEED"])
    for item in shown:
        if item in waiting or _has_its_day_later(item):
            continue
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: set[str] = set()
    for name, cases in tests.items():
        chosen = sample(
            [_parameters(case) for case in cases],
            keep=_keep(cases[0]),
            every_value=_shows_every_value(cases[0]),
            seed=f"{os.environ['HEADRACE_TEST_SEED']} {name}",
        )
        kept.update(cases[index].nodeid for index in chosen)
    left_out = [item for item in items if item.nodeid not in kept]
    items[:] = [item for item in items if item.nodeid in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def _waiting(items: Sequence[pytest.Item], seed: str) -> set[pytest.Item]:
    """Tests of suites whose class has its turn on another day."""
    suites: dict[str, list[tuple[int, pytest.Item]]] = {}
    for item in items:
        test, days = _test_of_a_suite(item)
        if days > 1:
            suites.setdefault(test, []).append(
                (turn(f"{test} {_class_name(item)}", seed, days), item)
            )
    waiting: set[pytest.Item] = set()
    for cases in suites.values():
        today = min(day for day, _ in cases)  # 0, unless there are few classes
        waiting.update(item for day, item in cases if day > today)
    return waiting


def _has_its_day_later(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("days")
    if mark is None:
        return False
    name = item.nodeid.partition("[")[0].replace("\\", "/").rpartition("/")[2]
    return turn(name, os.environ["HEADRACE_TEST_SEED"], mark.args[0]) != 0


def turn(name: str, seed: str, days: int) -> int:
    """In how many days something has its turn, today being 0, and a seed of digits being a day."""
    return (zlib.crc32(name.encode()) - _day(seed)) % days


def _day(seed: str) -> int:
    return int(seed) if seed.isdecimal() else zlib.crc32(seed.encode())


def todays(cases: Iterable[Case], days: int) -> list[Case]:
    """One of ``days`` cases, by turns: for fixtures, and for tests that go over many within themselves.

    All of them unless tails are sampled; at least one.
    """
    whole = list(cases)
    if not _is_on():
        return whole
    days = min(days, len(whole))
    first = -_day(os.environ["HEADRACE_TEST_SEED"]) % days
    return whole[first::days]


def _test_of_a_suite(item: pytest.Item) -> tuple[str, int]:
    """(name that all classes share, days between two turns of one class)."""
    name = getattr(item, "originalname", item.name)
    for definer in getattr(getattr(item, "cls", None), "__mro__", ()):
        if name in vars(definer):
            days = getattr(vars(definer)[name], TURNS, vars(definer).get(TURNS, 1))
            return f"{definer.__qualname__}.{name}", days
    return name, 1


def _class_name(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0].rpartition("::")[0]


def sample(
    cases: Sequence[Mapping[str, object]], *, keep: int, seed: str, every_value: bool = True
) -> list[int]:
    """Choose among the cases of one test.

    Args:
        cases: each one's parameters by name.
        keep: all are chosen if there are no more; else at least so many, and more where that takes
            more to show every value once.
        seed: one seed always chooses the same.
        every_value: False for ``keep`` and no more.

    Returns:
        The chosen positions, rising.
    """
    if len(cases) <= keep:
        return list(range(len(cases)))
    order = list(range(len(cases)))
    random.Random(seed).shuffle(order)
    if not every_value:
        return sorted(order[:keep])
    seen: set[tuple[str, str]] = set()
    first, others = list[int](), list[int]()
    for index in order:
        values = set(_values(cases[index]))
        (others if values <= seen else first).append(index)
        seen |= values
    return sorted(first + others[: max(0, keep - len(first))])


def _values(case: Mapping[str, object]) -> Iterable[tuple[str, str]]:
    # An object without a text of its own shows its address, which other processes do not share.
    return ((name, repr(value).partition(" at 0x")[0]) for name, value in case.items())


def _is_skipped(item: pytest.Item) -> bool:
    cls = getattr(item, "cls", None)
    for name, value in _parameters(item).items():
        served = getattr(cls, f"{name}s", None)
        if isinstance(value, str) and isinstance(served, tuple | list) and value not in served:
            return True
    return False


def _keep(item: pytest.Item) -> int:
    mark = item.get_closest_marker("keep")
    of_run = int(os.environ.get("HEADRACE_TEST_KEEP", KEEP))
    return of_run if mark is None else min(of_run, *mark.args)


def _shows_every_value(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("keep")
    return mark is None or bool(mark.kwargs.get("every_value", True))


def _parameters(item: pytest.Item) -> Mapping[str, object]:
    call = getattr(item, "callspec", None)
    return {} if call is None else call.params


def _is_on() -> bool:
    return os.environ.get("HEADRACE_TESTS", "full") == "sampled"
