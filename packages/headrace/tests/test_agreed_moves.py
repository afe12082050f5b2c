"""Moves of experts of several engines: engine 0 tells, and all do the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from headrace.assembly.parallel.agreed_moves import AfterPasses, AgreedMoves, MoveKind
from headrace_core.parallel import Communicator
from headrace_models.layers.moe.exchange import RowExchange
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


class Exchange:
    """Of passes that come when they must."""

    def call_all(self) -> None: ...

    def between(self) -> None: ...


def test_every_move_is_told_whole() -> None:
    arranged = [[[3, 1], [2, 0]], [[0, 1], [2, 3]]]

    def work(group: Communicator) -> list[Any]:
        here, exchange = Here(), Exchange()
        moves = AgreedMoves(here, cast(RowExchange, exchange), group)
        if group.rank == 0:
            moves.lead(MoveKind.ALL, arranged)
            moves.lead(MoveKind.BEGIN, arranged[:1], 1)
            moves.lead(MoveKind.END)
        else:
            for _ in range(3):
                exchange.between()
        return here.told

    leader, follower = run_ranks(2, work)
    assert leader == []
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
