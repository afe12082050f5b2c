"""Requests that wait for their adapter's slot: who passes them, and when their turn comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from stepwise_store import StepwiseStore

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.lora import LoRARequest
from headrace_engine.scheduler.adapter_slots import SlotPlanner


def adapter(number: int) -> LoRARequest:
    return LoRARequest(f"adapter {number}", number, f"/{number}")


class Slots:
    """A world whose model has slots.

    Args:
        settings: of the world.
    """

    def __init__(self, make_world: Callable[..., Any], num_slots: int, **settings: Any) -> None:
        self.store = StepwiseStore(settings.pop("kept", 5), at_once=True)
        self.world = make_world(adapters=SlotPlanner(num_slots, self.store), **settings)

    def add(self, name: str, number: int = 0, max_tokens: int = 3) -> list[int]:
        lora = adapter(number) if number else None
        if lora is not None:
            self.store.add(lora)
        return self.world.add(name, 4, max_tokens, lora_request=lora)

    def steps(self) -> list[list[str]]:
        """Names that each step computes, until nothing is left."""
        return [sorted(step) for step in self.world.run()]


def test_base_requests_pass_those_that_wait_for_a_slot(make_world):
    slots = Slots(make_world, 1)
    for name, number in [("a", 1), ("b", 2), ("c", 0), ("d", 1), ("e", 2)]:
        slots.add(name, number)
    steps = slots.steps()
    assert steps[:3] == [["a", "c", "d"]] * 3
    assert steps[3:] == [["b", "e"]] * 3


def test_a_slot_is_closed_for_the_adapter_that_has_waited_longest(make_world):
    """Requests of the first come all the time; the other one's runs when those under way have ended."""
    slots, order = Slots(make_world, 1, max_num_seqs=2), []
    slots.add("a0", 1, 6)
    slots.add("b", 2, 2)
    for number in range(1, 12):
        slots.add(f"a{number}", 1, 6)
        order += [name for name in slots.world.step() if name not in order]
    assert order[:4] == ["a0", "a1", "b", "a2"]


def test_five_adapters_take_turns_in_two_slots(make_world):
    slots = Slots(make_world, 2, max_num_seqs=4)
    wanted = {}
    for number in range(1, 6):
        for name in "xyz":
            wanted[f"{name}{number}"] = slots.add(f"{name}{number}", number)
    steps = slots.steps()
    assert all(len({name[1] for name in step}) <= 2 for step in steps)
    first = {}
    for index, step in enumerate(steps):
        for name in step:
            first.setdefault(int(name[1]), index)
    assert sorted(first, key=lambda number: first[number]) == [1, 2, 3, 4, 5]
    assert {name: slots.world.tokens(name) for name in wanted} == wanted


def test_those_that_waited_go_back_to_their_places(make_world):
    slots = Slots(make_world, 1, max_num_seqs=1)
    for name, number in [("a", 1), ("b", 2), ("c", 0), ("d", 2), ("e", 0)]:
        slots.add(name, number, 1)
    assert slots.steps() == [["a"], ["b"], ["c"], ["d"], ["e"]]


def test_a_slot_changes_only_when_no_step_in_flight_uses_it(make_world):
    slots = Slots(make_world, 1, overlapped=True)
    slots.add("a", 1, 8)
    slots.add("b", 2)
    slots.add("base", 0, 8)
    world = slots.world
    assert list(world.schedule().placed_adapters) == [0]
    world.scheduler.abort(["a"])
    assert world.schedule().placed_adapters == {}
    world.land()
    assert world.schedule().placed_adapters == {0: adapter(2)}


def test_what_is_not_in_memory_is_read_before_it_gets_its_slot(make_world):
    slots = Slots(make_world, 1, kept=1)
    slots.add("b", 2)
    slots.add("a", 1, 2)
    slots.world.scheduler.suspend(["b"])
    slots.add("base", 0, 20)
    slots.store._at_once = False
    slots.world.scheduler.resume(["b"])
    for _ in range(5):
        assert "b" not in slots.world.step()
    assert len(slots.store.pending) == 1
    slots.store.go_on()
    assert "b" in slots.world.step()


def test_requests_end_with_the_reason_why_their_adapter_is_gone(make_world):
    slots = Slots(make_world, 1, kept=1)
    for name, number in [("b", 2), ("c", 2), ("base", 0), ("a", 1)]:
        slots.add(name, number)
    slots.store._at_once = False
    assert list(slots.world.step()) == ["base"]
    slots.store.go_on(RequestError("no such folder"))
    assert list(slots.world.step()) == ["base", "a"]
    ended = {one.request_id: one.error for one in slots.world.scheduler.take_refused()}
    assert ended == dict.fromkeys("bc", "no such folder")


def test_statistics_count_by_name(make_world):
    slots = Slots(make_world, 1)
    for name, number in [("a", 1), ("b", 2), ("c", 2), ("d", 0)]:
        slots.add(name, number)
    slots.world.step()
    stats = slots.world.scheduler.stats()
    assert (stats.running_loras, stats.waiting_loras) == ({"adapter 1": 1}, {"adapter 2": 2})
    assert (stats.num_requests_running, stats.num_requests_waiting) == (2, 2)


def test_an_engine_without_slots_refuses_adapters(make_world):
    with pytest.raises(UnsupportedFeature, match="enable_lora=True"):
        make_world().add("a", 3, lora_request=adapter(1))


@pytest.mark.parametrize(("changes_media", "first"), [(False, ["a"]), (True, ["a", "b"])])
def test_media_of_an_adapter_that_changes_towers_do_not_wait_for_slices(
    make_world: Callable[..., Any], changes_media: bool, first: list[str]
) -> None:
    """What is embedded beside steps is embedded without adapters: such a request would wait for nothing."""
    store = StepwiseStore(5, at_once=True, changes_media=changes_media)
    world = make_world(adapters=SlotPlanner(1, store), budget=20, encoder_share=0.4)
    world.add("a", 3, max_tokens=9)
    world.step()
    store.add(adapter(1))
    world.add("b", 8, items=[(1, 6)], lora_request=adapter(1))
    step = world.schedule()
    assert (sorted(step.num_scheduled_tokens), len(step.media_ahead)) == (first, 2 - len(first))
    world.land()
