"""Experts that come in a thread: complete on every rank before any may put them in place."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from headrace_core.parallel import Communicator, SingleProcess
from headrace_distributed.eplb.background import BackgroundExchange
from headrace_distributed.eplb.moves import put_experts, receive_experts
from headrace_testing.model.decoders import run_ranks
from headrace_testing.waiting import wait_until

OLD, NEW = [[0, 1], [2, 3]], [[3, 1], [2, 0]]


def test_slots_change_when_they_are_told_to() -> None:
    may_read = threading.Event()
    ended: list[bool] = []

    def work(group: Communicator) -> list[Tensor]:
        slots = [[torch.full((2,), float(expert))] for expert in OLD[group.rank]]

        def receive() -> dict[int, Tensor]:
            if group.rank == 1:
                may_read.wait(20)
            return receive_experts(OLD, NEW, slots, group)

        exchange = BackgroundExchange(receive, group)
        assert [int(one[0][0]) for one in slots] == OLD[group.rank]
        if group.rank == 0:
            ended.append(exchange.has_ended)
            may_read.set()
            wait_until(lambda: exchange.has_ended, 20)
        put_experts(slots, exchange.result())
        exchange.close()
        return [one[0] for one in slots]

    found = run_ranks(2, work)
    assert [[int(slot[0]) for slot in slots] for slots in found] == NEW
    assert ended == [False], "a rank has not sent yet"


def test_what_an_exchange_raises_is_raised_where_its_result_is_asked_for() -> None:
    def fail() -> dict[int, Tensor]:
        raise OSError("rank 1 has died")

    exchange = BackgroundExchange(fail, SingleProcess())
    exchange.close()
    assert exchange.has_ended
    with pytest.raises(OSError, match="rank 1 has died"):
        exchange.result()
