"""When experts move: loads of the last steps, and what they say about the ranks that divide the experts."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from headrace_distributed.eplb.moves import Places
from headrace_distributed.eplb.policy import EPLBPolicy

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

BEGIN = 0.75
"""Part of an interval that counts as passed at the start, so that the first move comes early."""


class DividedExperts(Protocol):
    """Experts of a model's mixtures on all ranks, as rank 0 sees them. Letters: see
    :mod:`headrace_distributed.eplb.policy`."""

    def places(self) -> Sequence[Places]:
        """By mixture, where experts are."""
        ...

    def take_counts(self) -> Tensor:
        """[M, L] int64: tokens that went to each expert since the last call."""
        ...

    def arrange_experts(self, arranged: list[list[list[int]]]) -> None:
        """Move experts, on all ranks; by mixture, rank and slot."""
        ...

    def begin_move(self, mixture: int, places: list[list[int]]) -> None:
        """Have the weights of one mixture's experts come to all ranks, beside the steps."""
        ...

    @property
    def has_received(self) -> bool:
        """True if they have come, or that failed."""
        ...

    def end_move(self) -> None:
        """Let tokens find them, on all ranks, from the next step on. Raises what the exchange raised."""
        ...


class ExpertBalancer:
    """Counts tokens of experts, and moves experts at intervals. Rank 0's only; one thread.

    Args:
        window_size: steps that count.
        step_interval: steps between moves.
        log_balancedness: log for each step the tokens of an average rank over those of the busiest.
        use_async: weights come beside the steps, one mixture after the other, and a step's end puts them in
            place; else a step's end waits for all of them.
        title: of its lines in the log.
    """

    def __init__(
        self,
        experts: DividedExperts,
        policy: type[EPLBPolicy],
        *,
        window_size: int,
        step_interval: int,
        log_balancedness: bool = False,
        use_async: bool = False,
        title: str = "experts",
    ) -> None:
        self.experts, self.policy = experts, policy
        self.step_interval, self.log_balancedness = step_interval, log_balancedness
        self.passed = int(step_interval * BEGIN)
        """Steps since experts moved."""
        self._window_size = window_size
        self._window: Tensor | None = None
        self._at = 0
        self.num_moves = 0
        self._use_async, self._title = use_async, title
        self._coming: deque[tuple[int, list[list[int]]]] = deque()
        """Mixtures whose experts are on their way, or will be, and their new places."""
        self._loads: Tensor | None = None
        """By which they were arranged."""
        self._before = (0.0, 0.0)

    def begin(self) -> None:
        """Experts are where a start puts them: forget what was counted until now (dummy steps), and moves
        that were under way, of a model that has gone."""
        self.experts.take_counts()
        self._coming.clear()
        self._window, self._at = None, 0
        self.passed = int(self.step_interval * BEGIN)

    def after_step(self) -> None:
        """Count a step that has run, and move experts if it is time."""
        counts = self.experts.take_counts()
        if self._window is None:
            self._window = torch.zeros(self._window_size, *counts.shape, dtype=torch.int64)
        self._window[self._at] = counts
        self._at = (self._at + 1) % self._window_size
        if self.log_balancedness:
            average, most = self.of_ranks(counts)
            logger.info(
                "%s' tokens: average of ranks %.1f, busiest rank %.1f, balancedness %.3f",
                self._title, average, most, average / most if most else 1.0,
            )  # fmt: skip
        self.passed += 1
        if self._coming:
            self._go_on()
        elif self.passed >= self.step_interval:
            self.passed = 0
            self._rearrange(self._window.sum(0))

    def of_ranks(self, counts: Tensor) -> tuple[float, float]:
        """Tokens of an average rank, and of the busiest one in each mixture, summed over the mixtures.

        Copies of an expert count as equally used.

        Args:
            counts: [M, L].
        """
        average = most = 0.0
        for own, places in zip(counts.tolist(), self.experts.places(), strict=True):
            copies = [sum(slots.count(e) for slots in places) for e in range(len(own))]
            loads = [sum(own[e] / copies[e] for e in slots) for slots in places]
            average += sum(loads) / len(loads)
            most += max(loads)
        return average, most

    def _rearrange(self, loads: Tensor) -> None:
        """All ranks are on one host, so that groups of experts need not stay together."""
        if not int(loads.sum()):
            return
        places = self.experts.places()
        ranks, size = len(places[0]), len(places[0][0])
        found = self.policy.rebalance_experts(loads, ranks * size, 1, 1, ranks)
        arranged = [
            [
                _kept_in_place(was, own[rank * size : (rank + 1) * size])
                for rank, was in enumerate(old)
            ]
            for own, old in zip(found.physical_to_logical.tolist(), places, strict=True)
        ]
        self._before, self._loads = self.of_ranks(loads), loads
        if not self._use_async:
            self.experts.arrange_experts(arranged)
            self._tell()
            return
        self._coming.extend(
            (index, new)
            for index, (new, old) in enumerate(zip(arranged, places, strict=True))
            if new != [list(slots) for slots in old]
        )
        self._begin()

    def _go_on(self) -> None:
        """Put one mixture's experts in place, if they have come."""
        if self.experts.has_received:
            self.experts.end_move()
            self._coming.popleft()
            self._begin()

    def _begin(self) -> None:
        if self._coming:
            self.experts.begin_move(*self._coming[0])
        else:
            self._tell()

    def _tell(self) -> None:
        """Experts have moved, or are where they should be."""
        assert self._loads is not None
        before, after = self._before, self.of_ranks(self._loads)
        self.num_moves += 1
        logger.info(
            "%s moved: balancedness of the last steps' tokens %.3f, was %.3f",
            self._title,
            *(average / most if most else 1.0 for average, most in (after, before)),
        )


def _kept_in_place(old: Sequence[int], new: Sequence[int]) -> list[int]:
    """A rank's new experts in an order in which those that it has already stay where they are."""
    left = list(new)
    found: list[int | None] = [None] * len(old)
    for slot, expert in enumerate(old):
        if expert in left:
            found[slot] = expert
            left.remove(expert)
    return [left.pop(0) if expert is None else expert for expert in found]
