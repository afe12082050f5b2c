"""Moves of experts that one rank decides: all ranks of its group do the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headrace.assembly.parallel.agreed_moves import (
    AfterPasses,
    AfterSteps,
    AgreedMoves,
    MoveKind,
)
from headrace_core.parallel import Communicator
from headrace_testing.model.decoders import run_ranks

PLACES = [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
"""Of two mixtures on two ranks."""


class Here:
    """What one rank is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def places(self) -> list[list[list[int]]]:
        return PLACES

    def arrange_here(self, arranged: list[list[list[int]]]) -> None:
        self.told.append(arranged)

    def begin_here(self, index: int, places: list[list[int]]) -> None:
        self.told.append((index, places))

    def end_here(self) -> None:
        self.told.append("end")


def test_every_move_is_told_whole() -> None:
    arranged = [[[3, 1], [2, 0]], [[0, 1], [2, 3]]]

    def work(group: Communicator) -> list[Any]:
        here, called = Here(), list[str]()
        moves = AgreedMoves(here, group, lambda: called.append("all"))
        if group.rank == 0:
            moves.lead(MoveKind.ALL, arranged)
            moves.lead(MoveKind.BEGIN, arranged[:1], 1)
            moves.lead(MoveKind.END)
            return called
        assert [moves.follow() for _ in range(3)] == [MoveKind.ALL, MoveKind.BEGIN, MoveKind.END]
        return here.told

    leader, follower = run_ranks(2, work)
    assert leader == ["all"] * 3, "they are called before each"
    assert follower == [arranged, (1, arranged[0]), "end"]


def test_a_balancer_hears_of_passes_only() -> None:
    """A step whose requests all failed has none: the other engines may rest."""
    steps: list[str] = []
    passes = [True, True, False, True]
    balancer: Any = SimpleNamespace(
        begin=lambda: steps.append("begin"), after_step=lambda: steps.append("step")
    )
    watcher = AfterPasses(balancer, lambda: passes.pop(0))
    watcher.begin()
    for _ in range(3):
        watcher.after_step()
    assert steps == ["begin", "step", "step"]


def test_ranks_of_a_stage_follow_until_there_are_no_more_moves() -> None:
    def work(group: Communicator) -> list[Any]:
        here = Here()
        moves = AgreedMoves(here, group)
        for kinds in ((), (MoveKind.END, MoveKind.BEGIN)):
            if group.rank:
                moves.follow_all()
                here.told.append("step")
                continue
            for kind in kinds:
                moves.lead(kind, PLACES[1:] if kind == MoveKind.BEGIN else None, 1)
            moves.lead(MoveKind.NO_MORE)
        return here.told

    _, follower = run_ranks(2, work)
    assert follower == ["step", "end", (1, PLACES[1]), "step"]


def test_all_stages_are_told_of_steps() -> None:
    steps: list[str] = []
    watcher = AfterSteps(SimpleNamespace(balance_experts=lambda: steps.append("step")))
    watcher.begin()
    watcher.after_step()
    assert steps == ["step"]
