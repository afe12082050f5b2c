"""Requests of the simulated device whose tokens depend on seeds and position alone, as columns of arrays:
a step of thousands is a few operations on arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_core.step import NewRequest
from headrace_engine.sim.tokens import mixed, mixed_further, seed_of, simulated_token

COLUMNS = ("num_prompt", "num_tokens", "num_computed", "num_blocks")


class RowsStep(NamedTuple):
    """The effect of a step."""

    tokens: dict[str, int]
    """By request: what it sampled."""
    partial: list[str]
    """Requests whose prompts are not complete yet."""


class _Selection(NamedTuple):
    """The rows of a step."""

    counts: Mapping[str, int]
    ids: list[str]
    rows: NDArray[np.intp]
    new: NDArray[np.int64]


class RequestRows:
    """Requests by row.

    Args:
        engine_seed: of all tokens.
        vocab_size: tokens are below this.
        ends: tokens that are never chosen.
        block_size: tokens of a block.
    """

    def __init__(
        self, engine_seed: int, vocab_size: int, ends: Collection[int], block_size: int
    ) -> None:
        self._engine_seed = engine_seed
        self._vocab_size = vocab_size
        self._ends = ends
        self._block_size = block_size
        self._row_of: dict[str, int] = {}
        self._free: list[int] = []
        self._seeds: list[int] = []
        self._columns = np.zeros((len(COLUMNS), 0), np.int64)
        """``[columns, rows]``."""
        self._states = np.zeros(0, np.uint64)
        """``[rows]``, of mixing both seeds."""
        self._last: _Selection | None = None
        """The last step's selection, while rows are the same."""

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._row_of

    def __len__(self) -> int:
        return len(self._row_of)

    def add(self, new: NewRequest) -> None:
        """Take a request in.

        Raises:
            RuntimeError: it comes back with an output that is not its own.
        """
        seed = new.request.params.seed
        if seed is None:
            seed = seed_of(new.token_ids[: new.num_prompt_tokens])
        for position, token in enumerate(new.output_token_ids):
            if token != self._token(seed, position):
                raise RuntimeError(f"{new.request_id!r} came back with another output")
        self.remove(new.request_id)
        self._last = None
        if not self._free:
            self._grow()
        row = self._row_of[new.request_id] = self._free.pop()
        self._seeds[row] = seed
        self._states[row] = mixed(self._engine_seed, seed)
        self._columns[:, row] = (
            new.num_prompt_tokens,
            len(new.token_ids),
            new.num_computed_tokens,
            len(new.block_ids[0]),
        )

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._free.append(row)
            self._last = None

    def add_blocks(self, request_id: str, count: int) -> None:
        """A request has so many more blocks."""
        self._columns[COLUMNS.index("num_blocks"), self._row_of[request_id]] += count

    def run(self, counts: Mapping[str, int]) -> RowsStep:
        """Compute so many further tokens of requests.

        Raises:
            RuntimeError: the scheduler broke a promise.
        """
        _, ids, rows, new = self._select(counts)
        prompts, lengths, computed, blocks = self._columns[:, rows]
        computed += new
        self._check(ids, computed > lengths, "computes a token that does not exist yet")
        too_long = computed > blocks * self._block_size
        self._check(ids, too_long, "has no block for a token that it computes")
        self._columns[COLUMNS.index("num_computed"), rows] = computed
        samples = computed == lengths
        if samples.all():
            sampling, partial = ids, list[str]()
        else:
            sampling = [ids[i] for i in np.flatnonzero(samples)]
            partial = [ids[i] for i in np.flatnonzero(~samples)]
            rows, lengths, prompts = rows[samples], lengths[samples], prompts[samples]
        self._columns[COLUMNS.index("num_tokens"), rows] = lengths + 1
        return RowsStep(dict(zip(sampling, self._tokens(rows, lengths - prompts))), partial)

    def _select(self, counts: Mapping[str, int]) -> _Selection:
        """Ids, rows and further tokens of the requests of a step. Steps of the same requests may have one
        mapping, which nobody changes: it is looked up once."""
        last = self._last
        if last is None or last.counts is not counts:
            ids = list(counts)
            rows = np.fromiter(map(self._row_of.__getitem__, ids), np.intp, len(ids))
            new = np.fromiter(counts.values(), np.int64, len(ids))
            last = self._last = _Selection(counts, ids, rows, new)
        return last

    def _tokens(self, rows: NDArray[np.intp], positions: NDArray[np.int64]) -> list[int]:
        mixed_all = mixed_further(self._states[rows], positions.astype(np.uint64))
        tokens = (mixed_all % np.uint64(self._vocab_size)).astype(np.int64)
        refused = np.isin(tokens, list(self._ends))
        for index in np.flatnonzero(refused):
            seed = self._seeds[int(rows[index])]
            tokens[index] = self._token(seed, int(positions[index]))
        found: list[int] = tokens.tolist()
        return found

    def _token(self, seed: int, position: int) -> int:
        ends = self._ends
        return simulated_token(
            self._engine_seed, seed, position, self._vocab_size, lambda token: token not in ends
        )

    def _check(self, ids: list[str], broken: NDArray[np.bool_], message: str) -> None:
        if broken.any():
            raise RuntimeError(f"{ids[int(np.flatnonzero(broken)[0])]!r} {message}")

    def _grow(self) -> None:
        """Make room for as many rows again."""
        size = len(self._seeds)
        more = max(64, size)
        self._columns = np.concatenate(
            [self._columns, np.zeros((len(COLUMNS), more), np.int64)], axis=1
        )
        self._states = np.concatenate([self._states, np.zeros(more, np.uint64)])
        self._seeds += [0] * more
        self._free += range(size + more - 1, size - 1, -1)
