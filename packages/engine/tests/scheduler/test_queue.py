from __future__ import annotations

import pytest

from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_engine.scheduler.queue import (
    FairQueue,
    FCFSQueue,
    PriorityQueue,
    WaitingQueue,
)
from headrace_engine.scheduler.request import RequestStatus, SchedulerRequest


def state(
    number: int, priority: int = 0, arrival_time: float = 0.0, owner: str = ""
) -> SchedulerRequest:
    request = CoreRequest(
        f"r{number}", [1], SamplingParams(), frozenset(), 4, arrival_time, priority, owner=owner
    )
    return SchedulerRequest.create(request, number, by_priority=True, now=0.0, max_model_len=64)


def drain(queue: WaitingQueue) -> list[int]:
    return [queue.pop().sequence_number for _ in range(len(queue))]


def end(queue: WaitingQueue, ended: SchedulerRequest) -> None:
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


@pytest.mark.parametrize("kind", [FCFSQueue, PriorityQueue, lambda: FairQueue({})])
def test_what_was_set_aside_goes_back_to_its_place(kind: type[WaitingQueue]) -> None:
    queue = kind()
    states = [state(number) for number in range(6)]
    for number in (1, 3, 4):
        queue.push(states[number])
    queue.put_back([states[5], states[0], states[2]])
    assert drain(queue) == [0, 1, 2, 3, 4, 5]


def test_priority_then_arrival_then_order() -> None:
    queue = PriorityQueue()
    for waiting in (state(0, 5), state(1, 0, 2.0), state(2, 0, 1.0), state(3, 0, 1.0)):
        queue.push(waiting)
    queue.push_back_first(state(4, 3))
    assert drain(queue) == [2, 3, 1, 4, 0]


@pytest.mark.parametrize("kind", [FCFSQueue, PriorityQueue, lambda: FairQueue({})])
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


@pytest.mark.parametrize("kind", [FCFSQueue, PriorityQueue, lambda: FairQueue({})])
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


@pytest.mark.parametrize("kind", [FCFSQueue, PriorityQueue, lambda: FairQueue({})])
def test_one_from_the_middle_is_taken_out(kind: type[WaitingQueue]) -> None:
    queue = kind()
    states = [state(number) for number in range(5)]
    for waiting in states:
        queue.push(waiting)
    end(queue, states[1])
    queue.take(states[3])
    assert drain(queue) == [0, 2, 4]
    with pytest.raises(IndexError):
        queue.take(states[0])


@pytest.mark.req("REL-22")
def test_who_had_less_goes_first() -> None:
    queue = FairQueue({})
    for number in range(6):
        queue.push(state(number, owner="a"))
    for number in range(6, 9):
        queue.push(state(number, owner="b"))
    order = []
    while len(queue):
        order.append(queue.pop())
        queue.charge(order[-1].request.owner, 10)
    assert [s.sequence_number for s in order] == [0, 6, 1, 7, 2, 8, 3, 4, 5]


@pytest.mark.req("REL-22")
def test_weights_are_shares() -> None:
    queue = FairQueue({"b": 0.5})
    for number in range(40):
        queue.push(state(number, owner="ab"[number % 2]))
    taken = ""
    for _ in range(18):
        owner = queue.pop().request.owner
        taken += owner
        queue.charge(owner, 7)
    assert (taken.count("a"), taken.count("b")) == (12, 6)


@pytest.mark.req("REL-22")
def test_nobody_saves_up_while_away() -> None:
    queue = FairQueue({})
    queue.push(state(0, owner="b"))
    assert queue.pop().request.owner == "b"
    for number in range(1, 12):
        queue.push(state(number, owner="a"))
    for _ in range(5):
        queue.charge(queue.pop().request.owner, 100)
    for number in range(12, 18):
        queue.push(state(number, owner="b"))
    taken = ""
    for _ in range(8):
        owner = queue.pop().request.owner
        taken += owner
        queue.charge(owner, 100)
    assert taken.count("b") in (4, 5)


def test_one_owner_is_served_by_arrival() -> None:
    queue = FairQueue({})
    for number in range(5):
        queue.push(state(number))
        queue.charge("", 3)
    queue.push_back_first(state(9))
    assert drain(queue) == [9, 0, 1, 2, 3, 4]
    with pytest.raises(IndexError):
        queue.peek()


@pytest.mark.parametrize("kind", [FCFSQueue, PriorityQueue, lambda: FairQueue({})])
def test_who_is_not_there_cannot_be_taken_and_costs_nobody_a_place(
    kind: type[WaitingQueue],
) -> None:
    queue = kind()
    for number in range(3):
        queue.push(state(number))
    with pytest.raises(IndexError):
        queue.take(state(7))
    assert drain(queue) == [0, 1, 2]
