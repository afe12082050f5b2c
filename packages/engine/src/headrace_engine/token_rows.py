"""The last tokens of many requests: a step's are written at once, a request's are read at once.

A step is a row of an array, and a request has the same column in all of them. Mappings by step would say the
same, but each look-up waits for memory several times, and thousands are read in a step.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

NO_TOKEN = -1
"""In place of a token that a request does not have: below every token."""
_NOBODY = 0
"""The column of requests that have none."""


class TokenRows:
    """A row for each of the last steps, with a column for each request that was added.

    Args:
        num_kept: steps that are kept.
    """

    def __init__(self, num_kept: int) -> None:
        self.num_steps = 0
        """Steps that were written."""
        self._num_kept = num_kept
        self._column_of: dict[str, int] = {}
        self._free: list[int] = []
        self._rows = [_blank(1) for _ in range(num_kept)]
        """``[num_kept][columns]`` int32; a step's row is its number modulo the first."""
        self._names: list[str] = []
        """Requests of the last step, if their columns are still the same, else nothing."""
        self._columns: list[int] = []
        """A column for each of these names."""
        self._others: list[str] = []
        """The names that were not added."""

    def __len__(self) -> int:
        return len(self._column_of)

    def add(self, name: str) -> int:
        """Keep a request's tokens from the next step on; its column."""
        if not self._free:
            self._grow()
        column = self._column_of[name] = self._free.pop()
        self._names = []
        return column

    def remove(self, name: str) -> None:
        """Keep a request's tokens no longer. KeyError if it was not added."""
        self._free.append(self._column_of.pop(name))
        self._names = []

    def put(self, tokens: Mapping[str, int]) -> Sequence[str]:
        """Write a step's tokens.

        Args:
            tokens: by request; each below 2**31.

        Returns:
            Those of the requests that were not added, in the mapping's order.
        """
        names = list(tokens)
        if not names or names != self._names:
            column_of = self._column_of
            self._names = names
            self._columns = [column_of.get(name, _NOBODY) for name in names]
            self._others = [name for name in names if name not in column_of]
        index = self.num_steps % self._num_kept
        row = self._rows[index] = _blank(len(self._rows[index]))
        for column, token in zip(self._columns, tokens.values()):
            row[column] = token
        self.num_steps += 1
        return list(self._others)

    def read(self, column: int, count: int) -> list[int]:
        """A column's tokens of the last ``count`` steps, oldest first; :data:`NO_TOKEN` where it had none."""
        end = self.num_steps % self._num_kept
        start = end - count
        if start >= 0:
            return [row[column] for row in self._rows[start:end]]
        return [row[column] for row in (*self._rows[start:], *self._rows[:end])]

    def _grow(self) -> None:
        """Make room for as many columns again."""
        size = len(self._rows[0])
        more = max(64, size)
        for row in self._rows:
            row.extend(_blank(more))
        self._free += range(size + more - 1, size - 1, -1)


def _blank(num_columns: int) -> array[int]:
    return array("i", (NO_TOKEN,)) * num_columns
