"""States of recurrent layers while guesses are checked.

A state moves on with every token and cannot be taken back. So a step with guesses reads a request's state
from one block and writes to another, by turns: its own, that of its table, and a *spare* one. If all guesses
were right, the state goes on from where the step has left it. If not, it is still where it was before the
step, and the request is *behind*: its next step computes the right tokens again besides, without guesses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace_core.kv import KVCacheConfig
from headrace_core.step import NewRequest
from headrace_engine.execution.requests import RequestTable
from headrace_engine.kv.spare_states import first_spares

Ints = npt.NDArray[np.int64]

_NOWHERE = -1


class StateTurns:
    """Where the states of one worker's requests are. One thread only.

    Letters: B requests of a step.

    Args:
        table: the worker's requests, which it follows.
        config: the cache, spare blocks included.
        num_spares: spare blocks of each group.
    """

    def __init__(self, table: RequestTable, config: KVCacheConfig, num_spares: int) -> None:
        self._table, self._block_size = table, config.block_size
        self._first_spares = first_spares(config, num_spares)
        self._free = list(range(num_spares))
        self._spare_of: dict[int, int] = {}
        """Row -> its spare block, counted from a group's first."""
        self._in_spare: set[int] = set()
        """Rows whose state is in the spare block."""
        self._behind: set[int] = set()
        self._at: dict[int, dict[int, int]] = {group: {} for group in self._first_spares}
        """By group: row -> block of its table that a step has written last."""

    def add(self, row: int, new: NewRequest) -> None:
        """A request was taken in; where it begins, its table says."""

    def remove(self, row: int, request_id: str) -> None:
        """A request has gone."""
        self._release(row)
        for at in self._at.values():
            at.pop(row, None)
        self._behind.discard(row)

    def may_guess(self, row: int) -> bool:
        """True if the request has two blocks to take turns in; it keeps the spare one for this step."""
        if row in self._behind or any(
            at.get(row) != self._own(group, row) for group, at in self._at.items()
        ):
            return False  # a state that others may begin from is read, and nothing is written yet
        if row not in self._spare_of:
            if not self._free:
                return False
            self._spare_of[row] = self._free.pop()
        return True

    def behind(self, request_ids: Sequence[str]) -> dict[str, int]:
        """Those of the requests that lack more tokens than the one that the scheduler knows of, and how
        many more."""
        if not self._behind:
            return {}
        table, found = self._table, {}
        for request_id in request_ids:
            row = table.row_of.get(request_id)
            if row in self._behind:
                found[request_id] = int(table.num_tokens[row] - table.num_computed_tokens[row]) - 1
        return found

    def places(self, group: int, rows: Ints, computed: Ints) -> tuple[Ints, Ints]:
        """[B] each: the blocks with the states before a step and after it; -1 for those that begin with it.

        Args:
            rows: [B]; of the request table.
            computed: [B]; tokens before the step.
        """
        table, size = self._table, self._block_size
        blocks, at, first = table.block_tables[group], self._at[group], self._first_spares[group]
        after = blocks[rows, table.num_blocks[group, rows] - 1].astype(np.int64)
        before = blocks[rows, np.maximum(computed - 1, 0) // size].astype(np.int64)
        before[computed == 0] = _NOWHERE
        for b, row in enumerate(rows.tolist()):
            if row in self._in_spare:
                before[b] = first + self._spare_of[row]
                continue
            before[b] = at.get(row, before[b])
            if table.num_drafts[row]:
                after[b] = first + self._spare_of[row]
        return before, after

    def land(self, rows: Ints) -> None:
        """A step of these rows was computed. Those with guesses wait for :meth:`settle`."""
        table = self._table
        for row in rows.tolist():
            if not table.num_drafts[row]:
                self._is_in_own(row)
                self._behind.discard(row)

    def settle(self, row: int, all_right: bool) -> None:
        """A request's guesses were checked. If some were wrong, its state is what it was before the step."""
        if not all_right:
            self._behind.add(row)
            if row not in self._in_spare:
                self._release(row)
        elif row in self._in_spare:
            self._is_in_own(row)
        else:
            self._in_spare.add(row)

    def _own(self, group: int, row: int) -> int:
        """The block of the request's table that its steps write to."""
        table = self._table
        return int(table.block_tables[group][row, table.num_blocks[group, row] - 1])

    def _is_in_own(self, row: int) -> None:
        for group, at in self._at.items():
            at[row] = self._own(group, row)
        self._release(row)

    def _release(self, row: int) -> None:
        self._in_spare.discard(row)
        if (spare := self._spare_of.pop(row, None)) is not None:
            self._free.append(spare)
