"""Prompts that end in tokens which nothing attends to, for models that attend in both directions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace_engine.execution.requests import Ints


class AttendedTokens:
    """By row of the request table; a row without a number attends to all of its tokens."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def set(self, row: int, num_attended_tokens: int | None) -> None:
        """Keep a new request's; None: all."""
        self._numbers.pop(row, None)
        if num_attended_tokens is not None:
            self._numbers[row] = num_attended_tokens

    def clear(self, row: int) -> None:
        """Forget a row's request."""
        self._numbers.pop(row, None)

    def key_lens(self, rows: Ints, seq_lens: Ints) -> npt.NDArray[np.int32] | None:
        """[B] int32: tokens of each request that are attended to; None: all of all.

        Args:
            rows: [B]; rows of the request table.
            seq_lens: [B]; tokens of each request.
        """
        if not self._numbers:
            return None
        lengths = seq_lens.astype(np.int32)
        for b, row in enumerate(rows.tolist()):
            lengths[b] = min(lengths[b], self._numbers.get(row, lengths[b]))
        return lengths if (lengths < seq_lens).any() else None
