"""The last tokens of many requests: a step's are written at once, a request's are read at once.

A step is a row of an array, and a request has the same column in all of them. Mappings by step would say the
same, but each look-up waits for memory several times, and thousands are read in a step.

Loops over all requests of a step are of the interpreter's own parts (``map``, ``zip``, ``itemgetter``), but
for the one that writes a row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice, repeat
from operator import itemgetter

NO_TOKEN = (1 << 32) - 1
"""In place of a token that a request does not have: above every token."""
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
        """``[num_kept][columns]`` uint32; a step's row is its number modulo the first."""
        self._is_quiet = False
        """True if nobody was added or removed since the last step."""
        self._names: list[str] = []
        """Requests of the last step, if their columns are still the same, else nothing."""
        self._columns: list[int] = []
        """A column for each of these names."""

    def __len__(self) -> int:
        return len(self._column_of)

    def add(self, name: str) -> int:
        """Keep a request's tokens from the next step on; its column."""
        if not self._free:
            self._grow()
        column = self._column_of[name] = self._free.pop()
        self._forget_names()
        return column

    def remove(self, name: str) -> None:
        """Keep a request's tokens no longer. KeyError if it was not added."""
        self._free.append(self._column_of.pop(name))
        self._forget_names()

    def put(self, tokens: dict[str, int], *, finds_others: bool = False) -> list[str]:
        """Write a step's tokens.

        Args:
            tokens: by request; each below :data:`NO_TOKEN`.
            finds_others: see below.

        Returns:
            Those of the requests that were not added, in the mapping's order; or none, if nobody asks.
        """
        columns = self._columns
        if not self._names or list(tokens) != self._names:
            columns = list(map(self._column_of.get, tokens, repeat(_NOBODY)))
            if (
                self._is_quiet
            ):  # not in vain: the collector looks at each item of lists that are new
                self._names, self._columns = list(tokens), columns
        index = self.num_steps % self._num_kept
        row = self._rows[index] = _blank(len(self._rows[index]))
        for column, token in zip(columns, tokens.values()):
            row[column] = token
        self.num_steps += 1
        self._is_quiet = True
        return _others(tokens, columns) if finds_others else []

    def read(self, column: int, count: int) -> list[int]:
        """A column's tokens of the last ``count`` steps, oldest first; :data:`NO_TOKEN` where it had none."""
        return [row[column] for row in self._last(count)]

    def read_each(self, columns: Sequence[int], count: int) -> Iterable[Sequence[int]]:
        """:meth:`read` several columns, at least one of each and of steps."""
        if len(columns) == 1:
            return [self.read(columns[0], count)]
        return zip(*map(itemgetter(*columns), self._last(count)))

    def _last(self, count: int) -> Sequence[array[int]]:
        """The rows of the last so many steps, oldest first."""
        end = self.num_steps % self._num_kept
        start = end - count
        if start >= 0:
            return self._rows[start:end]
        return (*self._rows[start:], *self._rows[:end])

    def _forget_names(self) -> None:
        self._is_quiet = False
        if self._names:
            self._names, self._columns = [], []

    def _grow(self) -> None:
        """Make room for as many columns again."""
        size = len(self._rows[0])
        more = max(64, size)
        for row in self._rows:
            row.extend(_blank(more))
        self._free += range(size + more - 1, size - 1, -1)


def _blank(num_columns: int) -> array[int]:
    return array("I", (NO_TOKEN,)) * num_columns  # into "i" it takes a third longer to write


def _others(tokens: dict[str, int], columns: Sequence[int]) -> list[str]:
    """Requests whose column is nobody's; most of them are the last ones."""
    places, place = list[int](), -1
    with suppress(ValueError):
        while True:
            place = columns.index(_NOBODY, place + 1)
            places.append(place)
    if not places:
        return []
    names = list(islice(reversed(tokens), len(columns) - places[0]))
    return [names[len(columns) - 1 - place] for place in places]
