"""Requests that wait, in the order in which they should run."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from headrace_engine.scheduler.request import SchedulerRequest


class WaitingQueue(ABC):
    """Order of waiting requests.

    A request that finishes while it waits (aborted, or preempted and then found to be at its end)
    is not searched for: the caller says :meth:`discard`, and it is dropped when it gets to the
    head, or when more than half of what is stored is of that kind.
    """

    reorders_begun = False
    """True if prompts that have begun compete with those that wait (:meth:`in_order`, :meth:`precedes`); else
    they go on first, in the order in which they run."""

    def __init__(self) -> None:
        self._num_discarded = 0

    @abstractmethod
    def push(self, state: SchedulerRequest) -> None:
        """A new arrival."""

    @abstractmethod
    def push_back_first(self, state: SchedulerRequest) -> None:
        """A request that was taken out or preempted; of several, the last one pushed is first."""

    @abstractmethod
    def put_back(self, states: Iterable[SchedulerRequest]) -> None:
        """Requests that were taken out, each to its place by arrival."""

    @abstractmethod
    def pop(self) -> SchedulerRequest:
        """Take the head. IndexError if empty."""

    @abstractmethod
    def peek(self) -> SchedulerRequest:
        """The head. IndexError if empty."""

    @abstractmethod
    def _num_stored(self) -> int: ...

    @abstractmethod
    def _purge(self) -> None:
        """Drop what is FINISHED."""

    def refresh(self) -> None:  # noqa: B027 - most keep their order
        """A step is to be filled: the head is the same until it is, but for what comes and goes."""

    def in_order(self, begun: Sequence[SchedulerRequest]) -> Sequence[SchedulerRequest]:
        """Running requests that have begun their prompts, in the order in which they should go on."""
        return begun

    def precedes(self, begun: SchedulerRequest) -> bool:
        """True if the head should run before one that has begun its prompt. IndexError if empty."""
        return False

    def take(self, state: SchedulerRequest) -> None:
        """Take one out that need not be the head. IndexError if it is not here."""
        passed = []
        try:
            while (head := self.pop()) is not state:
                passed.append(head)
        finally:
            for other in reversed(passed):
                self.push_back_first(other)

    def discard(self) -> None:
        """One of the stored requests has just become FINISHED."""
        self._num_discarded += 1
        if self._num_discarded > len(self) + 64:
            self._purge()
            self._num_discarded = 0

    def __len__(self) -> int:
        return self._num_stored() - self._num_discarded


class FCFSQueue(WaitingQueue):
    """First come, first served; preempted requests return to the front."""

    def __init__(self) -> None:
        super().__init__()
        self._states: deque[SchedulerRequest] = deque()

    def push(self, state: SchedulerRequest) -> None:
        self._states.append(state)

    def push_back_first(self, state: SchedulerRequest) -> None:
        self._states.appendleft(state)

    def put_back(self, states: Iterable[SchedulerRequest]) -> None:
        self._states = merged_by_arrival(self._states, states)

    def pop(self) -> SchedulerRequest:
        self.peek()
        return self._states.popleft()

    def peek(self) -> SchedulerRequest:
        while self._states[0].finished:
            self._states.popleft()
            self._num_discarded -= 1
        return self._states[0]

    def _num_stored(self) -> int:
        return len(self._states)

    def _purge(self) -> None:
        self._states = deque(state for state in self._states if not state.finished)


class PriorityQueue(WaitingQueue):
    """Lowest ``sort_key`` first, preempted requests included."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[tuple[float, ...], SchedulerRequest]] = []

    def push(self, state: SchedulerRequest) -> None:
        # Keys end in the unique sequence number, so states themselves are never compared.
        heapq.heappush(self._heap, (state.sort_key, state))

    def push_back_first(self, state: SchedulerRequest) -> None:
        self.push(state)

    def put_back(self, states: Iterable[SchedulerRequest]) -> None:
        for state in states:
            self.push(state)

    def pop(self) -> SchedulerRequest:
        self.peek()
        return heapq.heappop(self._heap)[1]

    def peek(self) -> SchedulerRequest:
        while self._heap[0][1].finished:
            heapq.heappop(self._heap)
            self._num_discarded -= 1
        return self._heap[0][1]

    def _num_stored(self) -> int:
        return len(self._heap)

    def _purge(self) -> None:
        self._heap = [item for item in self._heap if not item[1].finished]
        heapq.heapify(self._heap)


class FairQueue(WaitingQueue):
    """The owner that had the fewest tokens goes first; an owner's own requests by arrival.

    Tokens are counted as they are computed, divided by the owner's weight. An owner that comes back
    after a pause starts level with the one that had the least of those that wait: nobody saves
    tokens up. With one owner this is first come, first served. (Virtual token counters: Sheng et
    al., "Fairness in Serving Large Language Models", OSDI 2024.)

    Args:
        weights: of owners; others have 1.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__()
        self._weights = weights
        self._queues: dict[str, deque[SchedulerRequest]] = {}
        """Never an empty one."""
        self._used: dict[str, float] = {}
        """By owner; names are the operator's, so they are few."""
        self._last_left = 0.0
        """Count of the owner that was the last to leave the queue empty."""

    def charge(self, owner: str, num_tokens: int) -> None:
        """So many tokens were computed for an owner."""
        share = num_tokens / self._weights.get(owner, 1.0)
        self._used[owner] = self._used.get(owner, 0.0) + share

    def push(self, state: SchedulerRequest) -> None:
        owner = state.request.owner
        if owner not in self._queues:
            least = min((self._used[other] for other in self._queues), default=self._last_left)
            self._used[owner] = max(self._used.get(owner, 0.0), least)
        self._queues.setdefault(owner, deque()).append(state)

    def push_back_first(self, state: SchedulerRequest) -> None:
        owner = state.request.owner
        self._used.setdefault(owner, 0.0)
        self._queues.setdefault(owner, deque()).appendleft(state)

    def put_back(self, states: Iterable[SchedulerRequest]) -> None:
        owned: dict[str, list[SchedulerRequest]] = {}
        for state in states:
            owned.setdefault(state.request.owner, []).append(state)
        for owner, own in owned.items():
            self._used.setdefault(owner, 0.0)
            self._queues[owner] = merged_by_arrival(self._queues.get(owner, ()), own)

    def pop(self) -> SchedulerRequest:
        state = self.peek()
        owner = state.request.owner
        queue = self._queues[owner]
        queue.popleft()
        if not queue:
            self._leave(owner)
        return state

    def peek(self) -> SchedulerRequest:
        for owner, queue in list(self._queues.items()):
            while queue and queue[0].finished:
                queue.popleft()
                self._num_discarded -= 1
            if not queue:
                self._leave(owner)
        if not self._queues:
            raise IndexError("nobody waits")
        return min(self._queues.values(), key=self._rank)[0]

    def _rank(self, queue: deque[SchedulerRequest]) -> tuple[float, int]:
        head = queue[0]
        return self._used[head.request.owner], head.sequence_number

    def _leave(self, owner: str) -> None:
        del self._queues[owner]
        self._last_left = self._used[owner]

    def _num_stored(self) -> int:
        return sum(map(len, self._queues.values()))

    def _purge(self) -> None:
        for owner, queue in list(self._queues.items()):
            self._queues[owner] = deque(state for state in queue if not state.finished)
            if not self._queues[owner]:
                self._leave(owner)


def merged_by_arrival(
    waiting: Iterable[SchedulerRequest], returned: Iterable[SchedulerRequest]
) -> deque[SchedulerRequest]:
    """Both in order of arrival. Those that waited keep their own order, whatever it is."""
    by_arrival = attrgetter("sequence_number")
    return deque(heapq.merge(waiting, sorted(returned, key=by_arrival), key=by_arrival))
