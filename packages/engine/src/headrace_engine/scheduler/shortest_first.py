"""Waiting prompts in the order of what is left to compute of them, with a bound on waiting.

Whoever has little left goes first, so that a short prompt does not wait for a long one; a request that
has waited longer than a target goes before all that have not, and among such requests the one that came
first. What is left does not count tokens that the prefix cache holds. Prompts that have begun compete
with those that wait: one that is overtaken keeps its blocks, and goes on when it is its turn again.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from headrace_engine.scheduler.queue import WaitingQueue, merged_by_arrival
from headrace_engine.scheduler.request import RequestStatus, SchedulerRequest

MOST_MEASURED = 16
"""Requests that are looked up in the prefix cache before a step, and again in turn: what it holds changes."""
MOST_MEASURED_TOKENS = 1 << 15
"""Prompt tokens after which no further request is looked up before a step: each is hashed the first time."""
SLACK = 64
"""Entries of a heap beyond twice the requests that wait, after which it is made anew."""


class ShortestFirstQueue(WaitingQueue):
    """See the module's docstring. Requests that were preempted or suspended go before all others, as ever:
    somebody is reading them.

    Each call takes a time that grows with the logarithm of those that wait.

    Args:
        target: seconds of waiting after which a request goes before those that wait for less
            (``target_ttft``).
        measure: tokens that are to be computed of a request before its first one.
        clock: that of ``queued_ts``.
    """

    reorders_begun = True

    def __init__(
        self,
        target: float,
        measure: Callable[[SchedulerRequest], int],
        clock: Callable[[], float],
    ) -> None:
        super().__init__()
        self._target = target
        self._measure = measure
        self._clock = clock
        self._now = clock()
        """Time at which the step began: the head must not change between two looks at it."""
        self._returned: deque[SchedulerRequest] = deque()
        self._new: OrderedDict[SchedulerRequest, None] = OrderedDict()
        """All others, the one that is to be measured next first."""
        self._by_length: list[tuple[int, int, SchedulerRequest]] = []
        self._by_arrival: list[tuple[int, SchedulerRequest]] = []
        """Heaps. An entry counts if its request is among the new ones (and has that length)."""

    def refresh(self) -> None:
        self._now = self._clock()
        num_tokens = 0
        for state in list(islice(self._new, MOST_MEASURED)):
            self._new.move_to_end(state)
            if state.finished:
                continue
            found = self._measure(state)
            if found != state.num_to_compute:
                state.num_to_compute = found
                heapq.heappush(self._by_length, (found, state.sequence_number, state))
            num_tokens += state.num_prompt_tokens
            if num_tokens >= MOST_MEASURED_TOKENS:
                break
        most = 2 * len(self._new) + SLACK
        if len(self._by_length) > most or len(self._by_arrival) > most:
            self._make_heaps()

    def push(self, state: SchedulerRequest) -> None:
        state.num_to_compute = state.num_tokens
        self._insert(state)
        self._new.move_to_end(state, last=False)

    def push_back_first(self, state: SchedulerRequest) -> None:
        if state.status is RequestStatus.PREEMPTED:
            self._returned.appendleft(state)
        else:
            self._insert(state)

    def put_back(self, states: Iterable[SchedulerRequest]) -> None:
        returned = []
        for state in states:
            if state.status is RequestStatus.PREEMPTED:
                returned.append(state)
            else:
                self._insert(state)
        self._returned = merged_by_arrival(self._returned, returned)

    def pop(self) -> SchedulerRequest:
        state = self.peek()
        if self._returned:
            self._returned.popleft()
        else:
            del self._new[state]
        return state

    def peek(self) -> SchedulerRequest:
        while self._returned:
            if not self._returned[0].finished:
                return self._returned[0]
            self._returned.popleft()
            self._num_discarded -= 1
        oldest = self._oldest()
        return oldest if self._is_overdue(oldest) else self._shortest()

    def take(self, state: SchedulerRequest) -> None:
        if state in self._new:
            del self._new[state]
        elif state in self._returned:
            self._returned.remove(state)
        else:
            raise IndexError(f"{state.request_id!r} does not wait here")

    def in_order(self, begun: Sequence[SchedulerRequest]) -> Sequence[SchedulerRequest]:
        return sorted(begun, key=self._rank)

    def precedes(self, begun: SchedulerRequest) -> bool:
        return self._rank(self.peek()) < self._rank(begun)

    def _rank(self, state: SchedulerRequest) -> tuple[int, int, int]:
        """Place in the order, of one that waits or of one that has begun its prompt."""
        runs = state.status is RequestStatus.RUNNING
        if state.num_output_tokens or state.num_preemptions or not (runs or state in self._new):
            return 0, 0, state.sequence_number
        if self._is_overdue(state):
            return 1, 0, state.sequence_number
        left = state.num_tokens - state.num_computed_tokens if runs else state.num_to_compute
        return 2, left, state.sequence_number

    def _is_overdue(self, state: SchedulerRequest) -> bool:
        return self._now - state.queued_ts > self._target

    def _oldest(self) -> SchedulerRequest:
        heap = self._by_arrival
        while not self._waits(heap[0][1]):
            heapq.heappop(heap)
        return heap[0][1]

    def _shortest(self) -> SchedulerRequest:
        heap = self._by_length
        while not (self._waits(heap[0][2]) and heap[0][0] == heap[0][2].num_to_compute):
            heapq.heappop(heap)
        return heap[0][2]

    def _waits(self, state: SchedulerRequest) -> bool:
        """True if a request is among the new ones; one that has ended is dropped."""
        if state.finished and state in self._new:
            del self._new[state]
            self._num_discarded -= 1
        return state in self._new

    def _insert(self, state: SchedulerRequest) -> None:
        self._new[state] = None
        heapq.heappush(self._by_length, (state.num_to_compute, state.sequence_number, state))
        heapq.heappush(self._by_arrival, (state.sequence_number, state))

    def _num_stored(self) -> int:
        return len(self._returned) + len(self._new)

    def _purge(self) -> None:
        self._returned = deque(state for state in self._returned if not state.finished)
        waiting = (state for state in self._new if not state.finished)
        self._new = OrderedDict.fromkeys(waiting, None)
        self._make_heaps()

    def _make_heaps(self) -> None:
        """Drop all entries that do not count."""
        self._by_length = [(s.num_to_compute, s.sequence_number, s) for s in self._new]
        heapq.heapify(self._by_length)
        self._by_arrival = sorted((s.sequence_number, s) for s in self._new)
