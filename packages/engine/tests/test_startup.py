"""The timeline of a start, and the collector's pause."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from headrace_engine.clients.wire import phases_of
from headrace_engine.startup import (
    MIDDLE_PER_FULL,
    StartupTimeline,
    collect_at_rest,
    collector_paused,
    process_age,
)


@pytest.fixture
def collector() -> Iterator[None]:
    was_on, thresholds = gc.isenabled(), gc.get_threshold()
    gc.unfreeze()  # what tests of others may have frozen
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    (gc.enable if was_on else gc.disable)()


@pytest.mark.req("REL-12")
def test_a_phase_inside_another_is_a_piece_of_it() -> None:
    now = 0.0
    timeline = StartupTimeline(clock=lambda: now)
    with timeline.phase("load"):
        with timeline.phase("read"):
            now += 2.0
            with timeline.phase("header"):
                now += 0.5
        now += 1.0
    timeline.finish()
    assert timeline.seconds == {"load": 3.5}
    assert timeline.accounted == 1.0
    names = [line[: line.index("  ", 2)] for line in timeline.describe().splitlines()]
    assert names == ["load", "  header", "  read", "total"]
    assert [(p.name, p.part_of) for p in phases_of(timeline)] == [
        ("header", "load"), ("read", "load"), ("load", None),
    ]  # fmt: skip


def test_a_phase_after_the_end_moves_the_end() -> None:
    now = 0.0
    timeline = StartupTimeline(clock=lambda: now)
    with timeline.phase("engine"):
        now += 2.0
    timeline.finish()
    with timeline.phase("routes"):
        now += 1.0
    now += 100
    assert timeline.wall == 3.0
    assert timeline.accounted == 1.0


def test_a_timeline_of_the_process_counts_what_was_before() -> None:
    age = process_age()
    timeline = StartupTimeline.of_process()
    begun = timeline.started
    timeline.clock = lambda: begun + timeline.seconds.get("start python", 0.0)  # no time passes
    timeline.finish()
    assert timeline.wall is not None
    assert timeline.wall >= age
    if age:  # not known everywhere
        assert timeline.seconds["start python"] >= age
        assert timeline.accounted > 0.9


@pytest.mark.usefixtures("collector")
def test_the_collector_rests_while_starting_and_goes_on_afterwards() -> None:
    gc.enable()
    with pytest.raises(ValueError), collector_paused():  # noqa: PT012
        assert not gc.isenabled()
        with collector_paused(freeze=True):  # of a second engine
            pass
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    with collector_paused(freeze=True):
        pass
    assert gc.get_freeze_count() > 0


@pytest.mark.usefixtures("collector")
def test_a_program_of_ours_has_full_collections_at_rest() -> None:
    gc.enable()
    gc.set_threshold(700, 10, 10)
    with collector_paused():
        pass
    collect_at_rest()
    assert gc.get_threshold() == (700, 10, 10), "a caller's collector is its own"
    with collector_paused(freeze=True):
        pass
    assert gc.get_threshold() == (700, 10, MIDDLE_PER_FULL)
    full = lambda: gc.get_stats()[2]["collections"]  # noqa: E731
    gc.collect()
    before = full()
    collect_at_rest()
    assert full() == before, "there is nothing since the last one"
    for _ in range(11):
        gc.collect(0)
    gc.collect(1)
    collect_at_rest()
    assert full() == before + 1


@pytest.mark.usefixtures("collector")
def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with collector_paused(freeze=True):
        pass
    assert not gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("collector")
def test_what_a_start_makes_is_old_at_once() -> None:
    gc.enable()
    with collector_paused():
        made = [[] for _ in range(3)]  # type: ignore[var-annotated]
    assert any(made is x for x in gc.get_objects(generation=2))
    mark: list[int] = []
    gc.freeze()  # another's; not counted, as what is frozen may die meanwhile
    with collector_paused():
        pass
    assert not any(mark is x for x in gc.get_objects()), "it is frozen no more"
