"""Which tokens a text holds, and how often: sparse, and cheap to extend by one token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class TokenCounts:
    """Distinct tokens in order of first appearance, with counts. Adding a token is O(1)."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        tokens = np.asarray(token_ids, np.int64)
        distinct, counts = np.unique(tokens, return_counts=True)
        self._size = len(distinct)
        room = max(16, 2 * self._size)
        self._ids = np.zeros(room, np.int64)
        self._counts = np.zeros(room, np.float32)
        self._ids[: self._size] = distinct
        self._counts[: self._size] = counts
        self._index = {token: i for i, token in enumerate(distinct.tolist())}

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """[n]; a view."""
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """[n]; a view."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Count one more."""
        i = self._index.get(token_id)
        if i is None:
            i = self._index[token_id] = self._size
            if i == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[i] = token_id
            self._size += 1
        self._counts[i] += 1
