"""Which rank computes which of a step's new tokens, where ranks divide prompts among them.

A token late in a prompt attends to more than an early one. A request's new tokens are therefore cut into
twice as many pieces as there are ranks, and rank r of N takes piece r and piece 2N - 1 - r, so that all
attend to about as much. Cuts are at borders of cache blocks: each block that a step writes is then written
by one rank, and goes to the others as a whole.

Source: Brandon et al. 2023, arXiv:2311.09431 (striped attention: balance under a causal mask); Llama Team
2024, arXiv:2407.21783, section 3.3.2 (2N pieces, the i-th and the (2N - 1 - i)-th for rank i).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LEAST_TOKENS = 128
"""New tokens of a request below which it is not cut: what ranks save is less than what exchanges cost."""


class NewTokens(NamedTuple):
    """A request's tokens in a step."""

    first: int
    """Position of the first one: so many are computed already."""
    count: int


class Piece(NamedTuple):
    """Neighbouring new tokens of a request, which one rank computes."""

    request: int
    """Its index in the batch."""
    start: int
    """Index of the first one among the request's new tokens."""
    end: int


class PromptDivision:
    """Divides the new tokens of steps over ranks; the same on every rank.

    Args:
        ranks: how many there are.
        block_size: tokens of a cache block.
        least_tokens: a step is divided if a request has so many new tokens.
    """

    def __init__(self, ranks: int, block_size: int, least_tokens: int = LEAST_TOKENS) -> None:
        self.ranks, self.block_size = ranks, block_size
        self.least_tokens = max(least_tokens, 2 * ranks * block_size)
        """New tokens of a request that is cut: its pieces have a block each."""

    def pieces(self, requests: Sequence[NewTokens]) -> list[list[Piece]] | None:
        """By rank: its pieces, in the order of the batch; None: every rank computes the whole step.

        Requests with few new tokens stay whole, each on the rank that has the fewest tokens by then.
        """
        if max(new.count for new in requests) < self.least_tokens:
            return None
        found: list[list[Piece]] = [[] for _ in range(self.ranks)]
        for index, new in enumerate(requests):
            if new.count >= self.least_tokens:
                for rank, start, end in self._cut(new):
                    found[rank].append(Piece(index, start, end))
        load = [sum(piece.end - piece.start for piece in pieces) for pieces in found]
        for index, new in enumerate(requests):
            if new.count < self.least_tokens:
                rank = load.index(min(load))
                found[rank].append(Piece(index, 0, new.count))
                load[rank] += new.count
        return [sorted(pieces) for pieces in found]

    def _cut(self, new: NewTokens) -> list[tuple[int, int, int]]:
        """(rank, start, end) of a request's pieces, in order; the last rank's two are one."""
        parts, size = 2 * self.ranks, self.block_size
        # Borders of blocks, nearest to equal parts; halves are rounded up.
        borders = [
            (2 * (new.first * parts + new.count * i) + parts * size) // (2 * parts * size) * size
            for i in range(1, parts)
        ]
        cuts = [0, *(border - new.first for border in borders), new.count]
        last = self.ranks - 1
        own = [(rank, cuts[rank], cuts[rank + 1]) for rank in range(last)]
        middle = (last, cuts[last], cuts[last + 2])
        back = [
            (rank, cuts[parts - 1 - rank], cuts[parts - rank]) for rank in reversed(range(last))
        ]
        return [*own, middle, *back]
