"""The last tokens of many requests: a step's are written at once, a request's are read at once.

A step is a row of an array, and a request has the same column in all of them. Mappings by step would say the
same, but each look-up waits for memory several times, and thousands are read in a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat

import numpy as np

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
        self._tokens = np.full((num_kept, 1), NO_TOKEN, np.int32)
        """``[num_kept, columns]``; a step's row is its number modulo the first."""
        self._names: list[str] = []
        """Requests of the last step, if their columns are still the same, else nothing; and these columns."""
        self._columns = np.zeros(0, np.intp)

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
            found = map(self._column_of.get, names, repeat(_NOBODY))
            self._names, self._columns = names, np.fromiter(found, np.intp, len(names))
        columns, row = self._columns, self._tokens[self.num_steps % self._num_kept]
        row[:] = NO_TOKEN
        row[columns] = np.fromiter(tokens.values(), np.int32, len(names))
        self.num_steps += 1
        return [names[index] for index in np.flatnonzero(columns == _NOBODY)]

    def read(self, column: int, count: int) -> list[int]:
        """A column's tokens of the last ``count`` steps, oldest first; :data:`NO_TOKEN` where it had none."""
        own = self._tokens[:, column]
        end = self.num_steps % self._num_kept
        start = end - count
        if start >= 0:
            found: list[int] = own[start:end].tolist()
            return found
        return [*own[start:].tolist(), *own[:end].tolist()]

    def _grow(self) -> None:
        """Make room for as many columns again."""
        size = self._tokens.shape[1]
        more = max(64, size)
        new = np.full((self._num_kept, more), NO_TOKEN, np.int32)
        self._tokens = np.concatenate([self._tokens, new], axis=1)
        self._free += range(size + more - 1, size - 1, -1)
