"""Slots: the spec's algorithm, step by step and against a simulator that only sees the updates."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace_core.sampling.logits_processor import BatchUpdate, MoveDirectionality
from headrace_core.sampling.params import SamplingParams
from headrace_engine.sampling.slots import SlotTracker, Tracked

ONE_WAY = MoveDirectionality.UNIDIRECTIONAL


def tracked(name: str) -> Tracked:
    return Tracked(name, SamplingParams(extra_args={"name": name}), [1], [])


def filled(*names: str) -> SlotTracker:
    tracker = SlotTracker()
    for name in names:
        tracker.add(tracked(name))
    tracker.update()
    return tracker


def shape(update: BatchUpdate | None) -> Any:
    """(batch size, removed, added slots with names, moves) of an update."""
    if update is None:
        return None
    added = [(slot, (params.extra_args or {})["name"]) for slot, params, _, _ in update.added]
    moved = [(source, target) for source, target, kind in update.moved if kind is ONE_WAY]
    assert len(moved) == len(update.moved)
    return update.batch_size, list(update.removed), added, moved


@pytest.mark.parametrize(
    ("gone", "new", "wanted", "slots"),
    [
        ("", "", None, "abcde"),
        ("", "xy", (7, [], [(5, "x"), (6, "y")], []), "abcdexy"),
        ("db", "xy", (5, [], [(1, "x"), (3, "y")], []), "axcye"),
        ("b", "xy", (6, [], [(1, "x"), (5, "y")], []), "axcdey"),
        ("dbe", "x", (3, [3, 4], [(1, "x")], []), "axc"),
        ("abc", "x", (3, [1, 2], [(0, "x")], [(4, 1), (3, 2)]), "xed"),
        ("ac", "", (3, [0, 2], [], [(4, 0), (3, 2)]), "ebd"),
        ("de", "", (3, [3, 4], [], []), "abc"),
        ("ae", "", (3, [0, 4], [], [(3, 0)]), "dbc"),
        ("abcde", "", (0, [0, 1, 2, 3, 4], [], []), ""),
        ("abcde", "x", (1, [1, 2, 3, 4], [(0, "x")], []), "x"),
    ],
)
def test_one_step(gone: str, new: str, wanted: Any, slots: str) -> None:
    tracker = filled(*"abcde")
    for name in gone:
        tracker.remove(name)
    for name in new:
        tracker.add(tracked(name))
    assert shape(tracker.update()) == wanted
    assert "".join(tracker.request_ids) == slots
    assert [tracker.slot(name) for name in slots] == list(range(len(slots)))
    assert tracker.update() is None


def test_who_is_not_there_cannot_go_and_who_returns_is_new() -> None:
    tracker = filled(*"ab")
    tracker.remove("z")
    assert tracker.update() is None
    tracker.remove("a")
    tracker.add(tracked("a"))
    assert shape(tracker.update()) == (2, [], [(0, "a")], [])


class Simulator:
    """A consumer: knows nothing but the updates, applied as the contract says."""

    def __init__(self) -> None:
        self.slots: dict[int, str] = {}

    def apply(self, update: BatchUpdate | None) -> None:
        if update is None:
            return
        for slot in update.removed:
            del self.slots[slot]
        for slot, params, _, _ in update.added:
            self.slots[slot] = (params.extra_args or {})["name"]
        for source, target, kind in update.moved:
            assert kind is ONE_WAY
            self.slots[target] = self.slots.pop(source)
        assert sorted(self.slots) == list(range(update.batch_size))


@pytest.mark.parametrize("seed", range(20))
def test_replaying_the_updates_gives_the_slots(seed: int) -> None:
    rng = random.Random(seed)
    tracker, simulator, alive = SlotTracker(), Simulator(), set()
    for step in range(200):
        before = len(alive)
        for name in [name for name in sorted(alive) if rng.random() < 0.2]:
            tracker.remove(name)
            alive.discard(name)
        num_gone = before - len(alive)
        new = [f"{step}.{i}" for i in range(rng.randint(0, 4) if rng.random() < 0.6 else 0)]
        for name in new:
            tracker.add(tracked(name))
            alive.add(name)
        update = tracker.update()
        assert (update is None) == (not num_gone and not new)
        if update is not None:
            assert len(update.removed) == max(0, num_gone - len(new))
            assert len(update.moved) <= len(update.removed)
        simulator.apply(update)
        assert list(map(simulator.slots.get, range(len(tracker)))) == tracker.request_ids
        assert set(tracker.request_ids) == alive
