"""Moves of experts that one rank decides, and all ranks of a group make between the same two passes.

The group is that of a stage, or of all engines that share experts. Its first rank sees the routing of all
rows of its mixtures, so its counts are those of all. Engines are told within the message that begins a pass
(:meth:`RowExchange.call_all`), so that no rank waits for it in another way, and an engine without requests
takes part like any other. Stages look after each step, of which rank 0 tells all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headrace_core.parallel import Communicator
    from headrace_distributed.eplb.balancer import ExpertBalancer

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
    NO_MORE = 3
    """None after this step."""


class MovesHere(Protocol):
    """One rank's experts, as they are told to move."""

    def places(self) -> Sequence[Sequence[Sequence[int]]]:
        """By mixture, rank and slot: an expert."""
        ...

    def arrange_here(self, arranged: Arranged) -> None: ...
    def begin_here(self, index: int, places: list[list[int]]) -> None: ...
    def end_here(self) -> None: ...


class AgreedMoves:
    """One rank's part in moves that the first rank of a group decides.

    Args:
        experts: of this rank.
        group: of the ranks that make them.
        call_all: called by the first rank before it tells a move: the others follow then.
    """

    def __init__(
        self, experts: MovesHere, group: Communicator, call_all: Callable[[], None] = lambda: None
    ) -> None:
        self._experts, self._group, self._call_all = experts, group, call_all

    def lead(self, kind: MoveKind, arranged: Arranged | None = None, index: int = 0) -> None:
        """Tell the other ranks of a move that this one makes now.

        Args:
            arranged: of all mixtures, or of the one that moves.
            index: of that one.
        """
        self._call_all()
        self._share([int(kind), index])
        if arranged is not None:
            self._share(_flat(arranged))

    def follow(self) -> MoveKind:
        """Make the move that the first rank tells of next."""
        number, index = self._share([0, 0])
        kind = MoveKind(number)
        if kind == MoveKind.ALL:
            self._experts.arrange_here(self._hear(len(self._experts.places())))
        elif kind == MoveKind.BEGIN:
            [places] = self._hear(1)
            self._experts.begin_here(index, places)
        elif kind == MoveKind.END:
            self._experts.end_here()
        return kind

    def follow_all(self) -> None:
        """Make the moves that the first rank tells of after a step, until there are no more."""
        while self.follow() != MoveKind.NO_MORE:
            pass

    def _hear(self, mixtures: int) -> Arranged:
        """New places of so many mixtures. Those of the first one show the numbers of ranks, and of slots of a
        rank, which are the same in every mixture."""
        places = self._experts.places()[0]
        ranks, slots = len(places), len(places[0])
        left = iter(self._share([0] * (mixtures * ranks * slots)))
        return [[[next(left) for _ in range(slots)] for _ in range(ranks)] for _ in range(mixtures)]

    def _share(self, numbers: list[int]) -> list[int]:
        """Numbers of the first rank, on every rank, which has as many."""
        import torch

        told = torch.tensor(numbers, dtype=torch.int64)
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


class BalancesExperts(Protocol):
    """Experts of all stages, as rank 0 tells them of steps."""

    def balance_experts(self) -> None:
        """Move the experts of each stage, if it is time to; on every rank."""
        ...


class AfterSteps:
    """Tells all stages of steps: each counts for itself where tokens of its mixtures went.

    Args:
        experts: whose method runs on every rank.
    """

    def __init__(self, experts: BalancesExperts) -> None:
        self._experts = experts

    def begin(self) -> None:
        """Each stage has begun to count when it was ready to serve."""

    def after_step(self) -> None:
        """A step has run, or has begun its way through the stages."""
        self._experts.balance_experts()


def _flat(arranged: Arranged) -> list[int]:
    return [expert for places in arranged for slots in places for expert in slots]
