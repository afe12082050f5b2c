"""Requests that a worker holds: one row each in arrays that grow.

Rows instead of objects: a step gathers its inputs with a handful of array operations, whatever the
number of requests. A row is reused after its request is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace_core.errors import RequestError
from headrace_core.step import NewRequest
from headrace_engine.sampling.state import SamplingTable
from headrace_engine.structured.matching import ConstraintMaker, RowConstraint

logger = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]

_FIRST_ROWS = 16
_FIRST_TOKENS = 1024
_FIRST_BLOCKS = 64


class RowTable(Protocol):
    """A further table of a worker's requests, by row or by id. It follows a :class:`RequestTable`, which
    adds each request to it and removes it."""

    def add(self, row: int, new: NewRequest) -> None:
        """Take in a request; nothing is kept of the row's last one. The request fails with what this
        raises."""
        ...

    def remove(self, row: int, request_id: str) -> None:
        """Forget a request; it may be one whose adding failed."""
        ...


class RequestTable:
    """Tokens, block tables and sampling settings by row. Requests are added and removed here, for all
    tables that :meth:`follow`.

    Letters: C rows, W longest token list so far, M longest block table so far (both powers of two).

    Args:
        pools: by cache group: the pool that its blocks are from.
        cross_groups: those of cross-attention layers, whose blocks hold encoder states.
        state_groups: those of recurrent layers, whose blocks hold a state each.
        vocab_size: for checking token ids.
        seed: of requests that bring none.
        constraints: makes those on the form of outputs; None: there are none.
    """

    def __init__(
        self,
        pools: Sequence[int],
        *,
        vocab_size: int,
        seed: int,
        constraints: ConstraintMaker | None = None,
        cross_groups: Sequence[int] = (),
        state_groups: Sequence[int] = (),
    ) -> None:
        self.cross_groups = frozenset(cross_groups)
        self.state_groups = frozenset(state_groups)
        self.vocab_size = vocab_size
        self.row_of: dict[str, int] = {}
        self.failures: dict[int, str] = {}
        """Row -> why nothing more comes of the request; it stays so until it is gone. Its tokens are
        computed all the same: others may have found them in the cache by now."""
        self.dead_ends: set[int] = set()
        """Rows of :attr:`failures` whose own parameters leave no next token."""
        self.broken: set[int] = set()
        """Rows of :attr:`failures` whose tokens and blocks are not here."""
        self.version = 0
        """Raised when a request comes, goes or fails: until then ids mean the same rows."""
        self.token_ids = np.zeros((_FIRST_ROWS, _FIRST_TOKENS), np.int32)
        """[C, W]; prompt, then what was sampled."""
        self.num_tokens = np.zeros(_FIRST_ROWS, np.int64)
        """[C]; known tokens."""
        self.num_drafts = np.zeros(_FIRST_ROWS, np.int64)
        """[C]; guesses of this step, which stand behind the known tokens."""
        self.num_prompt_tokens = np.zeros(_FIRST_ROWS, np.int64)
        self.num_computed_tokens = np.zeros(_FIRST_ROWS, np.int64)
        self.num_encoder_tokens = np.zeros(_FIRST_ROWS, np.int64)
        """[C]; encoder states."""
        self.block_tables = [np.zeros((_FIRST_ROWS, _FIRST_BLOCKS), np.int32) for _ in pools]
        """By group, [C, M]; zero past a request's blocks."""
        self.num_blocks = np.zeros((len(pools), _FIRST_ROWS), np.int64)
        self.highest_blocks = [0] * (1 + max(pools, default=-1))
        """By pool: largest block id ever held."""
        self.sampling = SamplingTable(_FIRST_ROWS, vocab_size=vocab_size, seed=seed)
        self._free_rows = list(range(_FIRST_ROWS - 1, -1, -1))
        self._followers: list[RowTable] = []
        self._constraints = constraints
        self._pools = tuple(pools)

    def __len__(self) -> int:
        return len(self.row_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.row_of

    def follow(self, *tables: RowTable) -> None:
        """Add requests to further tables from now on, in this order, and remove them there."""
        self._followers += tables

    def add(self, new: NewRequest) -> int:
        """Add a request to all tables and return its row. Its errors go to :attr:`failures`."""
        self.remove(new.request_id)
        if not self._free_rows:
            self._add_rows()
        row = self._free_rows.pop()
        self.row_of[new.request_id] = row
        self.num_blocks[:, row] = 0
        self.broken.add(row)
        self.version += 1
        for take_in in (self._fill, self._add_sampling, *(one.add for one in self._followers)):
            try:
                take_in(row, new)
            except RequestError as error:
                logger.info("request %s cannot run: %s", new.request_id, error)
                self.dead_ends.add(row)
                self.fail(row, str(error))
            except Exception as error:
                # A request that is wrong must not fail the step.
                logger.warning("request %s cannot run", new.request_id, exc_info=True)
                self.fail(row, f"{type(error).__name__}: {error}")
        return row

    def fail(self, row: int, reason: str) -> None:
        """See :attr:`failures`; the first reason stays."""
        self.failures.setdefault(row, reason)
        self.version += 1

    def append_blocks(self, request_id: str, block_ids: tuple[list[int], ...]) -> None:
        """Lengthen a request's block tables. Ids that are not held are ignored."""
        row = self.row_of.get(request_id)
        if row is None:
            return
        for group, ids in enumerate(block_ids):
            self._append(group, row, ids)

    def append_tokens(self, rows: Ints, token_ids: Ints) -> None:
        """Append one sampled token to each row's list."""
        ends = self.num_tokens[rows]
        self.place_tokens(rows, ends, token_ids)
        self.num_tokens[rows] = ends + 1
        self.sampling.observe(rows, token_ids)

    def place_tokens(self, rows: Ints, ends: Ints, token_ids: Ints) -> None:
        """Write one token of each row, at ``ends``; none becomes a known one."""
        if ends.size and int(ends.max()) >= self.token_ids.shape[1]:
            self.token_ids = _widened(self.token_ids, int(ends.max()) + 1)
        self.token_ids[rows, ends] = token_ids

    def place_drafts(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Let guesses stand behind the known tokens of requests, in place of those of the step before."""
        self.num_drafts[:] = 0
        for request_id, draft in drafts.items():
            row = self.row_of[request_id]
            start = int(self.num_tokens[row])
            end = start + len(draft)
            if end > self.token_ids.shape[1]:
                self.token_ids = _widened(self.token_ids, end)
            self.token_ids[row, start:end] = draft
            self.num_drafts[row] = len(draft)

    def remove(self, request_id: str) -> int | None:
        """Remove a request from all tables and return the row it had; None for unknown ids, which are
        ignored."""
        row = self.row_of.pop(request_id, None)
        if row is None:
            return None
        for group, table in enumerate(self.block_tables):
            table[row, : self.num_blocks[group, row]] = 0
        self.failures.pop(row, None)
        self.dead_ends.discard(row)
        self.broken.discard(row)
        self.version += 1
        self.sampling.remove(row)
        self._free_rows.append(row)
        for follower in self._followers:
            follower.remove(row, request_id)
        return row

    def output_tokens(self, row: int) -> npt.NDArray[np.int32]:
        """View of what was generated so far."""
        return self.token_ids[row, self.num_prompt_tokens[row] : self.num_tokens[row]]

    def _fill(self, row: int, new: NewRequest) -> None:
        if len(new.block_ids) != len(self.block_tables):
            raise ValueError(
                f"block tables for {len(new.block_ids)} cache groups were given, "
                f"there are {len(self.block_tables)}"
            )
        if not 0 <= new.num_computed_tokens < len(new.token_ids):
            raise ValueError(
                f"num_computed_tokens = {new.num_computed_tokens}: must be in "
                f"0..{len(new.token_ids) - 1}"
            )
        self._set_tokens(row, new)
        for group, ids in enumerate(new.block_ids):
            self._append(group, row, ids)
        self.broken.discard(row)

    def _add_sampling(self, row: int, new: NewRequest) -> None:
        self.sampling.add(row, new, self._constraint(new))

    def _constraint(self, new: NewRequest) -> RowConstraint | None:
        if new.request.constraint is None:
            return None
        if self._constraints is None:
            raise ValueError("structured output: this worker was built without it")
        return self._constraints.make(new.request.constraint, new.output_token_ids)

    def _set_tokens(self, row: int, new: NewRequest) -> None:
        tokens = np.asarray(new.token_ids, np.int64)
        count = len(tokens)
        if count > self.token_ids.shape[1]:
            self.token_ids = _widened(self.token_ids, count)
        outside = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
        if outside.size:
            raise ValueError(
                f"token id {int(outside[0])} is outside the vocabulary of {self.vocab_size} tokens"
            )
        self.token_ids[row, :count] = tokens
        self.num_tokens[row] = count
        self.num_drafts[row] = 0
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_computed_tokens[row] = new.num_computed_tokens
        self.num_encoder_tokens[row] = new.request.num_encoder_tokens

    def _append(self, group: int, row: int, ids: list[int]) -> None:
        if not ids:
            return
        start = int(self.num_blocks[group, row])
        end = start + len(ids)
        if end > self.block_tables[group].shape[1]:
            self.block_tables[group] = _widened(self.block_tables[group], end)
        self.block_tables[group][row, start:end] = ids
        pool = self._pools[group]
        self.highest_blocks[pool] = max(self.highest_blocks[pool], *ids)
        self.num_blocks[group, row] = end

    def _add_rows(self) -> None:
        old = len(self.num_tokens)
        self.token_ids = _doubled(self.token_ids)
        self.num_tokens = _doubled(self.num_tokens)
        self.num_drafts = _doubled(self.num_drafts)
        self.num_prompt_tokens = _doubled(self.num_prompt_tokens)
        self.num_computed_tokens = _doubled(self.num_computed_tokens)
        self.num_encoder_tokens = _doubled(self.num_encoder_tokens)
        self.block_tables = [_doubled(table) for table in self.block_tables]
        self.num_blocks = np.ascontiguousarray(_doubled(self.num_blocks.T).T)
        self.sampling.grow(2 * old)
        self._free_rows.extend(range(2 * old - 1, old - 1, -1))


def _doubled(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Twice as many rows, the new ones zero."""
    larger = np.zeros((2 * array.shape[0], *array.shape[1:]), array.dtype)
    larger[: array.shape[0]] = array
    return larger


def _widened(array: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    """At least ``width`` columns, the new ones zero."""
    larger = np.zeros((array.shape[0], 1 << (width - 1).bit_length()), array.dtype)
    larger[:, : array.shape[1]] = array
    return larger
