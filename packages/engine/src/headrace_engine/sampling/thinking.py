"""The end of a request's reasoning, forced once the reasoning has used up its budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from headrace_core.request import ThinkingBudget


class ThinkingLimit:
    """Follows one output until it holds the end of its reasoning.

    Tokens are compared, not texts: marks that the model spells with other tokens are not seen, and
    the end is forced in the usual ones.

    Args:
        budget: of the request.
        output: its tokens so far.
    """

    def __init__(self, budget: ThinkingBudget, output: Iterable[int] = ()) -> None:
        self._start, self._end = list(budget.start_token_ids), list(budget.end_token_ids)
        self._left = budget.max_tokens
        self._tail: deque[int] = deque(maxlen=max(len(self._start), len(self._end)))
        self._open = not self._start
        self._closed = False
        for token_id in output:
            self.observe(token_id)

    def observe(self, token_id: int) -> None:
        """The output has grown by a token."""
        if self._closed:
            return
        self._tail.append(token_id)
        if self._ends_with(self._end):
            self._closed = True
        elif self._open:
            self._left -= 1
        elif self._ends_with(self._start):
            self._open = True
            self._tail.clear()

    @property
    def forced(self) -> int | None:
        """The only token that may come next; None: any."""
        if self._closed or not self._open or self._left > 0:
            return None
        # What the output ends with may be the beginning of the end: it is not begun again.
        for size in range(len(self._end) - 1, 0, -1):
            if self._ends_with(self._end[:size]):
                return self._end[size]
        return self._end[0]

    def _ends_with(self, tokens: list[int]) -> bool:
        return len(self._tail) >= len(tokens) and list(self._tail)[-len(tokens) :] == tokens
