"""Rows of several engines, which come together at each mixture and go back to their engines.

Engines with data parallel attention share the experts: every rank of every engine has some of them whole. At
a mixture each rank gets the rows of all engines (all-gather), computes what its experts make of them, and the
shares of all ranks are summed where a row came from (reduce-scatter). Engines have different numbers of rows;
these are told once a pass, before the first layer.

Letters: N engines, M ranks of an engine, which all have its rows; W = N * M ranks; T rows of this engine, S
of all engines; H hidden size, k experts per row; P rows that an exchange has room for per engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headrace_core.errors import ModelError
from headrace_core.parallel import Communicator

if TYPE_CHECKING:
    from headrace_models.layers.moe.experts import Experts


BETWEEN = -1
"""Told as engine 0's number of rows: before the pass all ranks do something else together."""
LEAVING = -2
"""Told as the number of rows of an engine that has none, and is to end."""


RECORDED = 1 << 40
"""Added to the number of rows of an engine that has a recording for as many, or more."""


class MixtureCall(NamedTuple):
    """One call of a mixture in a pass, the same in every pass."""

    experts: Experts
    rows_per_token: int
    hidden_size: int
    dtype: torch.dtype
    top_k: int
    has_weights: bool


class Echo(Communicator):
    """A group in which the other ranks have what this one has: as long as they do not serve yet.

    Passes of that time are run to measure and to warm up, and their results are not used. They take the
    memory of a pass in which all engines have as many rows.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return torch.cat([tensor] * self._world_size, dim)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor

    def barrier(self) -> None:
        return None


class RowExchange:
    """The exchanges of one rank's mixtures with those of all other ranks of all engines.

    All ranks must run the same passes in the same order, each of which calls the same mixtures in the same
    order. The first pass shows which these are.

    Args:
        tensor: the ranks of this engine.
        engine: this engine's number.
        num_engines: N.
    """

    def __init__(self, tensor: Communicator, engine: int, num_engines: int) -> None:
        self.num_engines, self.engine = num_engines, engine
        self._tensor = tensor
        size = tensor.world_size
        self._group: Communicator = Echo(engine * size + tensor.rank, num_engines * size)
        self.counts: list[int] = []
        """Rows of each engine in the pass that runs; empty between passes."""
        self.calls: list[MixtureCall] = []
        """Of a pass, in order; known after the first one."""
        self.is_even = False
        """True in a pass of recordings: each engine has as many rows as the one with the most, some of which
        are padding."""
        self._records = False
        self.all_leave = False
        """True in the pass in which every engine says that it is to end."""
        self._is_known = False
        self._num_called = 0
        self.between: Callable[[], object] = lambda: None
        """Done by this rank between two passes, when the ranks of engine 0 call all others."""

    def start(self, group: Communicator) -> None:
        """Exchange rows from now on with a group of W ranks, those of each engine next to each other.

        Args:
            group: of which this rank is number ``engine * M`` and its own.
        """
        wanted = (self._group.rank, self._group.world_size)
        assert (group.rank, group.world_size) == wanted
        self._group = group

    def call_all(self) -> None:
        """Have all ranks of all other engines run :attr:`between` before their next pass; returns when they
        begin to. All ranks of engine 0 call it, and only after a pass in which an engine had rows: then all
        come to a further one."""
        assert self.engine == 0
        self._tell(BETWEEN)

    def _tell(self, number: int) -> list[int]:
        """A number of this engine -> those of all."""
        told = self._group.all_gather(torch.tensor([number], dtype=torch.int64), dim=0)
        found: list[int] = told[:: self._tensor.world_size].tolist()
        return found

    @contextmanager
    def recording(self, group: Communicator) -> Iterator[None]:
        """For the block, passes are recorded, as even ones in which nobody tells anything.

        Args:
            group: see :meth:`start`; its calls are recorded.
        """
        echo, self._group, self._records = self._group, group, True
        try:
            yield
        finally:
            self._group, self._records = echo, False

    @contextmanager
    def one_pass(self, num_tokens: int, *, has_recording: bool = False) -> Iterator[Sequence[int]]:
        """A pass of this engine's model, or an empty one; gives each engine's number of tokens.

        Every rank of every engine must begin one at the same time.

        Args:
            num_tokens: of this engine; 0, or :data:`LEAVING`: it runs no layers, and takes part by
                :meth:`take_part`.
            has_recording: this engine has a recording for as many, or more. If that is said by every engine
                that has rows, the pass is even.
        """
        self._begin_pass(num_tokens + RECORDED * has_recording)
        try:
            yield self.counts
        finally:
            self.counts, self.is_even = [], False
        if not self._is_known:
            self._is_known = True
        elif num_tokens > 0 and self._num_called != len(self.calls):
            raise ModelError(
                f"a pass called {self._num_called} mixtures, and the first one {len(self.calls)}"
            )

    def _begin_pass(self, number: int) -> None:
        """Tell a number of rows, and know those of all."""
        self._num_called = 0
        if self._records:
            self.counts, self.is_even = [number] * self.num_engines, True
            return
        told = self._tell(number)
        while told[0] == BETWEEN:
            self.between()
            told = self._tell(number)
        self.all_leave = all(each == LEAVING for each in told)
        having = [each for each in told if each > 0]
        self.is_even = bool(having) and min(having) > RECORDED
        self.counts = [max(0, each) % RECORDED for each in told]
        if self.is_even:
            self.counts = [max(self.counts)] * self.num_engines

    def replayed(self) -> None:
        """This engine's part of an even pass was a recording, whose calls are not seen here."""
        self._num_called = len(self.calls)

    def take_part(self) -> None:
        """Do this rank's share of a pass in which its engine has no rows, or only padding: of all calls, in
        order."""
        for call in self.calls:
            rows = self.counts[self.engine] * call.rows_per_token
            x = torch.zeros(rows, call.hidden_size, dtype=call.dtype)
            weights = torch.zeros(rows, call.top_k) if call.has_weights else None
            call.experts(x, weights, torch.zeros(rows, call.top_k, dtype=torch.int64))

    def begin_call(self, experts: Experts, x: Tensor, weights: Tensor | None, ids: Tensor) -> int:
        """Note a call of a mixture; its number of rows for each token.

        Raises:
            ModelError: it is outside a pass, or another call is due: ranks would wait for each other.
        """
        if not self.counts:
            raise ModelError(f"{experts.name}: called outside a pass in which engines meet")
        own, index = self.counts[self.engine], self._num_called
        self._num_called += 1
        if not self._is_known:
            share, rest = divmod(len(x), own)
            if rest:
                raise ModelError(f"{experts.name}: {len(x)} rows for {own} tokens")
            call = MixtureCall(
                experts, share, x.shape[1], x.dtype, ids.shape[1], weights is not None
            )
            self.calls.append(call)
            return share
        due = self.calls[index] if index < len(self.calls) else None
        if due is None or due.experts is not experts or len(x) != own * due.rows_per_token:
            raise ModelError(
                f"{experts.name}: its rows or its turn are not those of the first pass"
            )
        return due.rows_per_token

    def gather(
        self, x: Tensor, weights: Tensor | None, ids: Tensor, rows_per_token: int
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The rows of all engines, in their order.

        Args:
            x: [T, H].
            weights: [T, k] float32; None: there are none.
            ids: [T, k] int64, below 2 ** 31.
            rows_per_token: of every engine.

        Returns:
            The same of S rows.
        """
        if self.is_even:  # nothing is packed, so that it can be recorded
            gather = self._group.all_gather
            own = None if weights is None else gather(weights, dim=0)
            return gather(x, dim=0), own, gather(ids, dim=0)
        parts = [x, ids.to(torch.int32)]
        if weights is not None:
            parts.append(weights)
        sent = torch.cat([_bytes(part) for part in parts], dim=1)
        found = self._compact(self._all_rows(sent, rows_per_token), rows_per_token)
        ends = [part.shape[1] * part.itemsize for part in parts]
        pieces = torch.split(found, ends, dim=1)
        whole = [
            piece.contiguous().view(part.dtype) for piece, part in zip(pieces, parts, strict=True)
        ]
        return whole[0], whole[2] if weights is not None else None, whole[1].to(torch.int64)

    def scatter(self, shares: Tensor, rows_per_token: int) -> Tensor:
        """This rank's shares of all rows [S, H] -> sums over all ranks, of this engine's rows [T, H]."""
        room = self._room(rows_per_token)
        counts = [count * rows_per_token for count in self.counts]
        if min(counts) < room:
            padded = shares.new_zeros(self.num_engines, room, shares.shape[1])
            for rows, own in zip(padded, torch.split(shares, counts), strict=True):
                rows[: len(own)] = own
            shares = padded.flatten(0, 1)
        # Pieces of an engine's rows go to its ranks, in whose order they are put together again.
        summed = self._group.reduce_scatter(shares.contiguous(), dim=0)
        return self._tensor.all_gather(summed, dim=0)[: counts[self.engine]]

    def _room(self, rows_per_token: int) -> int:
        """P: enough for the engine with the most rows, and a multiple of M."""
        ranks = self._tensor.world_size
        return -(-max(self.counts) * rows_per_token // ranks) * ranks

    def _all_rows(self, sent: Tensor, rows_per_token: int) -> Tensor:
        """[N, P, B] of all engines' rows, of this one's [T, B]: each of its ranks sends a piece."""
        ranks = self._tensor.world_size
        size = self._room(rows_per_token) // ranks
        own = sent[self._tensor.rank * size :][:size]
        if len(own) < size:
            own = torch.nn.functional.pad(own, (0, 0, 0, size - len(own)))
        gathered = self._group.all_gather(own, dim=0)
        return gathered.view(self.num_engines, ranks * size, -1)

    def _compact(self, rows: Tensor, rows_per_token: int) -> Tensor:
        """[S, B]: without what is there for room only."""
        counts = [count * rows_per_token for count in self.counts]
        if min(counts) == rows.shape[1]:
            return rows.flatten(0, 1)
        return torch.cat([own[:count] for own, count in zip(rows, counts, strict=True)])


def _bytes(rows: Tensor) -> Tensor:
    """rows [T, n] as [T, n * item size] uint8."""
    return rows.contiguous().view(torch.uint8)
