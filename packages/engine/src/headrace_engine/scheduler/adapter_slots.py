"""Which adapters are in a model's slots, and which requests wait for one. No torch.

A request runs only while its adapter is in a slot. What waits for a slot is set *aside*, out of the queue,
so that it keeps nobody else from running; it goes back to its place when its adapter has a slot.

A slot that no running request needs goes to the adapter that has waited longest. If there is none, the slot
with the fewest running requests is *closed*: it takes no further ones, and is free when those have ended. So
every adapter has its turn, however many requests with the others come; all other slots stay open.

A slot changes only when all steps with its adapter have ended, and its next adapter is in the host's memory.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace_core.errors import RequestError
from headrace_core.lora import LoRARequest
from headrace_engine.lora.store import AdapterStore, KnownAdapter

if TYPE_CHECKING:
    from headrace_engine.scheduler.request import SchedulerRequest


class Place(enum.Enum):
    """The place of a request with an adapter."""

    NOWHERE = "nowhere"
    """New, suspended, or ended."""
    QUEUE = "queue"
    RUNNING = "running"
    ASIDE = "aside"


@dataclass(eq=False, slots=True)
class _Slot:
    index: int
    adapter: KnownAdapter | None = None
    is_loading: bool = False
    """Its adapter is still being read."""
    is_closed: bool = False
    is_fresh: bool = False
    """No request has run since its adapter came."""
    num_running: int = 0
    free_after: int = 0
    """Number of steps that must have ended before it may change."""


@dataclass(slots=True)
class OpenedSlots:
    """What changes when slots are handed out."""

    returned: list[SchedulerRequest] = field(default_factory=list)
    """Requests that wait for no slot any more."""
    failed: list[tuple[SchedulerRequest, RequestError]] = field(default_factory=list)
    """Requests whose adapter cannot be read any more."""


class SlotPlanner:
    """Hands out the slots of one model.

    Args:
        num_slots: different adapters of a step.
        store: has the adapters.
    """

    def __init__(self, num_slots: int, store: AdapterStore) -> None:
        self._store = store
        self._slots = [_Slot(index) for index in range(num_slots)]
        self._aside: dict[KnownAdapter | None, dict[str, SchedulerRequest]] = {}
        """In the order in which adapters began to wait; never an empty one."""
        self._queued: Counter[KnownAdapter | None] = Counter()
        """Requests in the queue; never a count of 0."""
        self._placed: dict[int, LoRARequest] = {}
        self._num_scheduled = 0
        self._num_ended = 0
        self.num_aside = 0
        """Requests that are set aside."""

    # -- requests ------------------------------------------------------------------------------

    def enter(self, state: SchedulerRequest) -> None:
        """A request has come.

        Raises:
            RequestError: its adapter is not known.
        """
        request = state.request.lora_request
        if request is None:
            return
        adapter = self._store.find(request.lora_int_id)
        if adapter is None:
            raise RequestError(
                f"lora_request: adapter {request.lora_name!r} is not loaded", param="lora_request"
            )
        state.adapter = adapter
        self._store.enter(adapter)

    def leave(self, state: SchedulerRequest) -> None:
        """A request has ended."""
        if state.adapter is not None:
            self.move(state, Place.NOWHERE)
            self._store.leave(state.adapter)

    def move(self, state: SchedulerRequest, place: Place) -> None:
        """A request is somewhere else from now on."""
        adapter, before = state.adapter, state.place
        if adapter is None:
            return
        state.place = place
        if before is Place.QUEUE:
            self._queued[adapter] -= 1
            if not self._queued[adapter]:
                del self._queued[adapter]
        elif before is Place.RUNNING:
            self._ran(adapter)
        elif before is Place.ASIDE:
            self._take_back(adapter, state)
        if place is Place.QUEUE:
            self._queued[adapter] += 1
        elif place is Place.RUNNING:
            self._runs(adapter)
        elif place is Place.ASIDE:
            self._aside.setdefault(adapter, {})[state.request_id] = state
            self.num_aside += 1

    def admits(self, state: SchedulerRequest) -> bool:
        """True if a request that waits may run; else it is to be set aside.

        Raises:
            RequestError: its adapter cannot be read any more.
        """
        adapter = state.adapter
        if adapter is None:
            return True
        slot = self._slot_of(adapter)
        if slot is None and not self._in_need() and (slot := self._idle_slot()) is not None:
            self._give(slot, adapter)
        return slot is not None and not slot.is_closed and not slot.is_loading

    # -- slots ---------------------------------------------------------------------------------

    def open_slots(self) -> OpenedSlots:
        """Hand out what is free; before requests are admitted to a step."""
        opened = OpenedSlots()
        for slot in self._slots:
            if slot.is_loading:
                self._go_on_loading(slot, opened)
        failed = {state.adapter for state, _ in opened.failed}
        for adapter in self._in_need():
            idle = self._idle_slot()
            if idle is None:
                break
            if adapter not in failed:
                self._give_to_waiting(idle, adapter, opened)
        self._close_or_reopen()
        for slot in self._slots:
            if slot.adapter is not None and not slot.is_closed and not slot.is_loading:
                opened.returned += self._aside.get(slot.adapter, {}).values()
        return opened

    def slot_to_force(self, state: SchedulerRequest) -> KnownAdapter | None:
        """The adapter whose requests must leave for :meth:`force` to give their slot to another; None: none
        need to."""
        if state.adapter is None or self._slot_of(state.adapter) is not None:
            return None
        slot = self._least_busy()
        return slot.adapter if slot.num_running else None

    def force(self, state: SchedulerRequest) -> bool:
        """Give a slot to a request that must run alone next, while no step is in flight. False: its
        adapter is still being read.

        Raises:
            RequestError: it cannot be read any more.
        """
        if state.adapter is None:
            return True
        slot = self._slot_of(state.adapter)
        if slot is None:
            slot = self._least_busy()
            self._give(slot, state.adapter)
        elif slot.is_loading:
            self._load(slot)
        return not slot.is_loading

    def take_placed(self) -> dict[int, LoRARequest]:
        """What the next step must put into slots, each once."""
        placed, self._placed = self._placed, {}
        return placed

    def step_scheduled(self) -> None:
        """A step is in flight from now on."""
        self._num_scheduled += 1

    def step_ended(self) -> None:
        """The oldest step in flight has ended."""
        self._num_ended += 1

    def forget(self) -> None:
        """Nobody knows what is in the slots. No request runs."""
        self._placed.clear()
        for slot in self._slots:
            self._clear(slot)
            slot.free_after = self._num_scheduled

    def _runs(self, adapter: KnownAdapter) -> None:
        slot = self._slot_of(adapter)
        assert slot is not None, "a request runs whose adapter is in no slot"
        slot.num_running += 1
        slot.is_fresh = False

    def _ran(self, adapter: KnownAdapter) -> None:
        slot = self._slot_of(adapter)
        assert slot is not None, "a request ran whose adapter was in no slot"
        slot.num_running -= 1
        slot.free_after = self._num_scheduled

    def _take_back(self, adapter: KnownAdapter, state: SchedulerRequest) -> None:
        waiting = self._aside[adapter]
        del waiting[state.request_id]
        self.num_aside -= 1
        if not waiting:
            del self._aside[adapter]

    def _slot_of(self, adapter: KnownAdapter) -> _Slot | None:
        return next((slot for slot in self._slots if slot.adapter is adapter), None)

    def _in_need(self) -> Sequence[KnownAdapter]:
        """Adapters that wait for a slot, the one that has waited longest first."""
        have = {slot.adapter for slot in self._slots}
        return [one for one in self._aside if one is not None and one not in have]

    def _idle_slot(self) -> _Slot | None:
        """A slot that may be given to another adapter: an empty one, else the least recently used."""
        idle = [slot for slot in self._slots if self._is_idle(slot)]
        return min(idle, key=self._worth, default=None)

    def _is_idle(self, slot: _Slot) -> bool:
        return self._may_drain(slot) and not slot.num_running and slot.free_after <= self._num_ended

    def _may_drain(self, slot: _Slot) -> bool:
        """False while requests that the slot was given for have not run."""
        if slot.is_loading:
            return False
        waited_for = slot.adapter in self._queued or slot.adapter in self._aside
        return not (slot.is_fresh and waited_for)

    def _worth(self, slot: _Slot) -> tuple[bool, bool, int]:
        if slot.adapter is None:
            return False, False, 0
        return True, slot.adapter in self._queued, slot.free_after

    def _least_busy(self) -> _Slot:
        return min(self._slots, key=lambda slot: (slot.num_running, self._worth(slot)))

    def _close_or_reopen(self) -> None:
        """Close a slot while an adapter waits for one, and none is about to be free."""
        if not self._in_need():
            for slot in self._slots:
                slot.is_closed = False
            return
        if any(slot.is_closed for slot in self._slots):
            return
        draining = [slot for slot in self._slots if self._may_drain(slot)]
        if draining:
            slot = min(draining, key=lambda slot: (slot.num_running, slot.free_after))
            slot.is_closed = True

    def _give_to_waiting(self, slot: _Slot, adapter: KnownAdapter, opened: OpenedSlots) -> None:
        try:
            self._give(slot, adapter)
        except RequestError as error:
            opened.failed += [(state, error) for state in self._aside[adapter].values()]

    def _go_on_loading(self, slot: _Slot, opened: OpenedSlots) -> None:
        adapter = slot.adapter
        assert adapter is not None
        if adapter not in self._aside:  # nobody waits for it any more
            self._clear(slot)
            return
        try:
            self._load(slot)
        except RequestError as error:
            opened.failed += [(state, error) for state in self._aside[adapter].values()]

    def _give(self, slot: _Slot, adapter: KnownAdapter) -> None:
        self._clear(slot)
        self._store.hold(adapter)
        slot.adapter, slot.is_loading, slot.is_fresh = adapter, True, True
        self._load(slot)

    def _load(self, slot: _Slot) -> None:
        """Have the next step put a slot's adapter there, if it is in memory.

        Raises:
            RequestError: it cannot be read any more; the slot is empty.
        """
        adapter = slot.adapter
        assert adapter is not None
        try:
            if not self._store.ready(adapter):
                return
        except RequestError:
            self._clear(slot)
            raise
        slot.is_loading = False
        self._placed[slot.index] = adapter.request

    def _clear(self, slot: _Slot) -> None:
        if slot.adapter is not None:
            self._store.let_go(slot.adapter)
        slot.adapter, slot.is_loading, slot.is_closed, slot.is_fresh = None, False, False, False
        self._placed.pop(slot.index, None)
