"""When experts move, and by which steps' tokens."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_distributed.eplb.balancer import ExpertBalancer
from headrace_distributed.eplb.policy import DefaultPolicy, EPLBPolicy, ExpertPlaces


class Experts:
    """One mixture of 4 experts on 2 ranks; each step sends its tokens where the test says."""

    def __init__(self) -> None:
        self.now = [[0, 1], [2, 3]]
        self.step = [1, 1, 1, 1]
        self.moves: list[Any] = []
        self.coming: list[list[int]] | None = None
        self.has_received = False

    def places(self) -> list[list[list[int]]]:
        return [self.now]

    def take_counts(self) -> Tensor:
        return torch.tensor([self.step])

    def arrange_experts(self, arranged: list[list[list[int]]]) -> None:
        self.moves.append(arranged)
        [self.now] = arranged

    def begin_move(self, mixture: int, places: list[list[int]]) -> None:
        assert mixture == 0
        assert self.coming is None, "one move at a time"
        self.coming, self.has_received = places, False

    def end_move(self) -> None:
        assert self.coming is not None
        assert self.has_received
        self.moves.append([self.coming])
        self.now, self.coming = self.coming, None


class Recorded(EPLBPolicy):
    """Remembers what it is asked."""

    asked: list[tuple[Any, ...]]

    @classmethod
    def rebalance_experts(cls, weight: Tensor, *sizes: Any) -> ExpertPlaces:
        cls.asked.append((weight.tolist(), *sizes))
        return DefaultPolicy.rebalance_experts(weight, *sizes)


@pytest.fixture
def policy() -> type[Recorded]:
    Recorded.asked = []
    return Recorded


def test_moves_at_intervals_the_first_one_early(policy: type[Recorded]) -> None:
    experts = Experts()
    balancer = ExpertBalancer(experts, policy, window_size=100, step_interval=8)
    found = []
    for _ in range(20):
        balancer.after_step()
        found.append(len(experts.moves))
    assert [step for step in range(1, 20) if found[step] > found[step - 1]] == [1, 9, 17]
    assert policy.asked[0] == ([[2, 2, 2, 2]], 4, 1, 1, 2)


def test_only_the_last_steps_count(policy: type[Recorded]) -> None:
    experts = Experts()
    balancer = ExpertBalancer(experts, policy, window_size=3, step_interval=8)
    for step in range(1, 11):
        experts.step = [step, 0, 0, 1]
        balancer.after_step()
    assert [asked[0] for asked in policy.asked] == [[[3, 0, 0, 2]], [[27, 0, 0, 3]]]


def test_ranks_get_equally_many_tokens(caplog: pytest.LogCaptureFixture) -> None:
    experts = Experts()
    experts.step = [40, 30, 20, 10]
    balancer = ExpertBalancer(experts, DefaultPolicy, window_size=4, step_interval=4)
    assert balancer.of_ranks(experts.take_counts()) == (50.0, 70.0)
    with caplog.at_level(logging.INFO):
        balancer.after_step()
    assert balancer.of_ranks(experts.take_counts()) == (50.0, 50.0)
    assert "balancedness of the last steps' tokens 1.000, was 0.714" in caplog.text
    assert experts.now == [[0, 3], [2, 1]], "those that a rank keeps stay in their slots"


def test_without_tokens_nothing_moves() -> None:
    experts = Experts()
    experts.step = [0, 0, 0, 0]
    balancer = ExpertBalancer(experts, DefaultPolicy, window_size=4, step_interval=1)
    balancer.after_step()
    assert not experts.moves


def test_balancedness_is_logged_for_each_step(caplog: pytest.LogCaptureFixture) -> None:
    experts = Experts()
    experts.step = [6, 0, 2, 0]
    settings = {"window_size": 4, "step_interval": 100, "log_balancedness": True}
    balancer = ExpertBalancer(experts, DefaultPolicy, **settings)
    with caplog.at_level(logging.INFO):
        balancer.after_step()
    assert "average of ranks 4.0, busiest rank 6.0, balancedness 0.667" in caplog.text


def test_weights_that_come_beside_steps_are_put_in_place_once_they_are_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    experts = Experts()
    experts.step = [40, 30, 20, 10]
    balancer = ExpertBalancer(
        experts, DefaultPolicy, window_size=4, step_interval=4, use_async=True
    )
    with caplog.at_level(logging.INFO):
        for _ in range(9):  # longer than an interval: no other move begins
            balancer.after_step()
            assert experts.now == [[0, 1], [2, 3]]
            assert experts.coming == [[0, 3], [2, 1]]
        assert not caplog.records
        experts.has_received = True
        balancer.after_step()
    assert experts.now == [[0, 3], [2, 1]]
    assert balancer.num_moves == 1
    assert "balancedness of the last steps' tokens 1.000, was 0.714" in caplog.text


def test_what_is_on_its_way_does_not_come_after_another_start() -> None:
    experts = Experts()
    experts.step = [40, 30, 20, 10]
    balancer = ExpertBalancer(
        experts, DefaultPolicy, window_size=4, step_interval=4, use_async=True
    )
    balancer.after_step()
    assert experts.coming == [[0, 3], [2, 1]]
    experts.step = [0, 0, 0, 0]
    balancer.begin()
    experts.has_received = True
    for _ in range(3):
        balancer.after_step()
    assert experts.now == [[0, 1], [2, 3]]
    assert balancer.num_moves == 0


def test_experts_that_are_where_they_should_be_are_not_sent() -> None:
    experts = Experts()
    experts.now = [[0, 3], [2, 1]]
    experts.step = [40, 30, 20, 10]
    balancer = ExpertBalancer(
        experts, DefaultPolicy, window_size=4, step_interval=4, use_async=True
    )
    balancer.after_step()
    assert experts.coming is None
    assert balancer.num_moves == 1
