"""Moves of experts between engines that share them: engine 0 decides, and all ranks of all engines move them
between the same two passes.

Rank 0 of engine 0 sees the routing of all engines' rows, so its counts are those of all. What it decides is
told within the message that begins a pass (:meth:`RowExchange.call_all`), so that no rank waits for it in
another way, and an engine without requests takes part like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headrace_core.parallel import Communicator
    from headrace_distributed.eplb.balancer import ExpertBalancer
    from headrace_models.layers.moe.exchange import RowExchange

Arranged = list[list[list[int]]]
"""By mixture, rank and slot: an expert."""


class MoveKind(IntEnum):
    """A move that all ranks make."""

    ALL = 0
    """Move experts of all mixtures now."""
    BEGIN = 1
    """Begin to receive those of one."""
    END = 2
    """Put these in place."""


class MovesHere(Protocol):
    """One rank's experts, as they are told to move."""

    def places(self) -> Sequence[Sequence[Sequence[int]]]:
        """By mixture, rank and slot: an expert."""
        ...

    def arrange_here(self, arranged: Arranged) -> None: ...
    def begin_here(self, index: int, places: list[list[int]]) -> None: ...
    def end_here(self) -> None: ...


class AgreedMoves:
    """One rank's part in moves of experts of several engines.

    Args:
        experts: of this rank.
        exchange: of its mixtures.
        group: all ranks of all engines, rank 0 of engine 0 being the first.
    """

    def __init__(self, experts: MovesHere, exchange: RowExchange, group: Communicator) -> None:
        self._experts, self._exchange, self._group = experts, exchange, group
        exchange.between = self._follow

    def lead(self, kind: MoveKind, arranged: Arranged | None = None, index: int = 0) -> None:
        """Tell all other engines of a move that the ranks of engine 0 make now. All of these call it, after a
        pass in which an engine had rows.

        Args:
            arranged: of all mixtures, or of the one that moves.
            index: of that one.
        """
        self._exchange.call_all()
        self._share([int(kind), index, *_flat(arranged or [])])

    def _follow(self) -> None:
        """Make the move that engine 0 tells of."""
        kind, index, *flat = self._share([])
        mixtures, ranks, slots = self._shape()
        if kind == MoveKind.END:
            self._experts.end_here()
        elif kind == MoveKind.BEGIN:
            [places] = _arranged(flat, 1, ranks, slots)
            self._experts.begin_here(index, places)
        else:
            self._experts.arrange_here(_arranged(flat, mixtures, ranks, slots))

    def _shape(self) -> tuple[int, int, int]:
        """Numbers of mixtures, ranks and slots of a rank, which are the same in every mixture."""
        places = self._experts.places()
        return len(places), len(places[0]), len(places[0][0])

    def _share(self, numbers: list[int]) -> list[int]:
        """Numbers of the first rank, on every rank."""
        import torch

        mixtures, ranks, slots = self._shape()
        told = torch.zeros(2 + mixtures * ranks * slots, dtype=torch.int64)
        told[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        found: list[int] = self._group.broadcast(told, 0).tolist()
        return found


class AfterPasses:
    """Tells a balancer of passes that ran, and of nothing else: only after one do all engines come to a
    further pass, before which they hear of a move.

    Args:
        balancer: of engine 0.
        take_has_run: True once after each pass in which an engine had rows.
    """

    def __init__(self, balancer: ExpertBalancer, take_has_run: Callable[[], bool]) -> None:
        self._balancer, self._take_has_run = balancer, take_has_run

    def begin(self) -> None:
        """The next step is the first with requests."""
        self._take_has_run()
        self._balancer.begin()

    def after_step(self) -> None:
        """A step has run, with a pass or without."""
        if self._take_has_run():
            self._balancer.after_step()


def _flat(arranged: Arranged) -> list[int]:
    return [expert for places in arranged for slots in places for expert in slots]


def _arranged(flat: list[int], mixtures: int, ranks: int, slots: int) -> Arranged:
    left = iter(flat)
    return [[[next(left) for _ in range(slots)] for _ in range(ranks)] for _ in range(mixtures)]
