"""Requests that wait, in the order in which they should run."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque

from headrace_engine.scheduling.request import RequestState


class WaitingQueue(ABC):
    """Order of waiting requests.

    A request that finishes while it waits (aborted, or preempted and then found to be at its end)
    is not searched for: the caller says :meth:`discard`, and it is dropped when it gets to the
    head, or when more than half of what is stored is of that kind.
    """

    def __init__(self) -> None:
        self._num_discarded = 0

    @abstractmethod
    def push(self, state: RequestState) -> None:
        """A new arrival."""

    @abstractmethod
    def push_back_first(self, state: RequestState) -> None:
        """A request that was taken out or preempted; of several, the last one pushed is first."""

    @abstractmethod
    def pop(self) -> RequestState:
        """Take the head. IndexError if empty."""

    @abstractmethod
    def peek(self) -> RequestState:
        """The head. IndexError if empty."""

    @abstractmethod
    def _num_stored(self) -> int: ...

    @abstractmethod
    def _purge(self) -> None:
        """Drop what is FINISHED."""

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
        self._states: deque[RequestState] = deque()

    def push(self, state: RequestState) -> None:
        self._states.append(state)

    def push_back_first(self, state: RequestState) -> None:
        self._states.appendleft(state)

    def pop(self) -> RequestState:
        self.peek()
        return self._states.popleft()

    def peek(self) -> RequestState:
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
        self._heap: list[tuple[tuple[float, ...], RequestState]] = []

    def push(self, state: RequestState) -> None:
        # Keys end in the unique sequence number, so states themselves are never compared.
        heapq.heappush(self._heap, (state.sort_key, state))

    def push_back_first(self, state: RequestState) -> None:
        self.push(state)

    def pop(self) -> RequestState:
        self.peek()
        return heapq.heappop(self._heap)[1]

    def peek(self) -> RequestState:
        while self._heap[0][1].finished:
            heapq.heappop(self._heap)
            self._num_discarded -= 1
        return self._heap[0][1]

    def _num_stored(self) -> int:
        return len(self._heap)

    def _purge(self) -> None:
        self._heap = [item for item in self._heap if not item[1].finished]
        heapq.heapify(self._heap)
