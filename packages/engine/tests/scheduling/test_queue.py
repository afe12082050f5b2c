from __future__ import annotations

import pytest

from headrace_core.request import CoreRequest
from headrace_core.sampling import SamplingParams
from headrace_engine.scheduling.queue import FCFSQueue, PriorityQueue, WaitingQueue
from headrace_engine.scheduling.request import RequestState, RequestStatus


def state(number: int, priority: int = 0, arrival_time: float = 0.0) -> RequestState:
    request = CoreRequest(
        f"r{number}", [1], SamplingParams(), frozenset(), 4, arrival_time, priority
    )
    return RequestState.create(request, number, by_priority=True, now=0.0, max_model_len=64)


def drain(queue: WaitingQueue) -> list[int]:
    return [queue.pop().sequence_number for _ in range(len(queue))]


def end(queue: WaitingQueue, ended: RequestState) -> None:
    ended.status = RequestStatus.FINISHED
    queue.discard()


def test_first_come_first_served() -> None:
    queue = FCFSQueue()
    states = [state(number) for number in range(5)]
    for waiting in states[:3]:
        queue.push(waiting)
    for returned in (states[4], states[3]):  # victims come last first
        queue.push_back_first(returned)
    assert queue.peek() is states[3]
    assert drain(queue) == [3, 4, 0, 1, 2]


def test_priority_then_arrival_then_order() -> None:
    queue = PriorityQueue()
    for waiting in (state(0, 5), state(1, 0, 2.0), state(2, 0, 1.0), state(3, 0, 1.0)):
        queue.push(waiting)
    queue.push_back_first(state(4, 3))
    assert drain(queue) == [2, 3, 1, 4, 0]


@pytest.mark.parametrize("kind", [FCFSQueue, PriorityQueue])
def test_ended_requests_are_passed_over(kind: type[WaitingQueue]) -> None:
    queue = kind()
    states = [state(number) for number in range(4)]
    for waiting in states:
        queue.push(waiting)
    end(queue, states[0])
    end(queue, states[2])
    assert len(queue) == 2
    assert queue.peek() is states[1]
    assert drain(queue) == [1, 3]
    assert len(queue) == 0


@pytest.mark.parametrize("kind", [FCFSQueue, PriorityQueue])
def test_ended_requests_do_not_pile_up_behind_the_head(kind: type[WaitingQueue]) -> None:
    queue = kind()
    queue.push(state(0))
    for number in range(1, 2000):
        waiting = state(number)
        queue.push(waiting)
        end(queue, waiting)
    assert len(queue) == 1
    assert queue._num_stored() < 200
    assert drain(queue) == [0]
