"""The end of a request's reasoning, forced once the reasoning has used up its budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from headrace_core.request import ThinkingBudget


class ThinkingLimit:
    """Follows one output until it holds the end of its reasoning.

    Tokens are compared, not texts: an end that the model spells with other tokens is not seen, and
    forced in the usual ones.

    Args:
        budget: of the request.
        output: its tokens so far.
    """

    def __init__(self, budget: ThinkingBudget, output: Iterable[int] = ()) -> None:
        self._end = list(budget.end_token_ids)
        self._left = budget.max_tokens
        self._tail: deque[int] = deque(maxlen=len(self._end))
        self._closed = False
        for token_id in output:
            self.observe(token_id)

    def observe(self, token_id: int) -> None:
        """The output has grown by a token."""
        if self._closed:
            return
        self._left -= 1
        self._tail.append(token_id)
        self._closed = list(self._tail) == self._end

    @property
    def forced(self) -> int | None:
        """The only token that may come next; None: any."""
        if self._closed or self._left > 0:
            return None
        tail = list(self._tail)
        # What the output ends with may be the beginning of the end: it is not begun again.
        for size in range(min(len(tail), len(self._end) - 1), 0, -1):
            if tail[-size:] == self._end[:size]:
                return self._end[size]
        return self._end[0]
