"""Guesses by a part of a model that reads the model's hidden states: EAGLE, MLP speculators, Medusa, MTP.

The state of position p and token p + 1 are one input of the head, and make the entry of position p in its
caches. So the last state of a request waits until the token behind it is known; the rows that wait are
computed in one pass, when guesses are asked for, and that pass gives the first guess. Later guesses are made
from the head's own states. What is behind a wrong guess is computed again, from the model's states.

Prompts are computed as the steps bring them, chunk after chunk. Tokens that are found in the prefix cache
have their entries in the head's caches, too, made when they were computed; only the entry of the last of them
may be that of another continuation, and where a request ended before its last states were read, those few
entries are not of it. A guess may then be wrong, as any guess may.

Letters: B requests that are guessed for, T rows of a pass, W width of the head, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace_core.graph import StepGraph
from headrace_core.speculation import DraftTask, ReadsStates, StepStates
from headrace_core.step import NewRequest
from headrace_engine.execution.inputs import StepInputs
from headrace_engine.speculation.draft_context import DraftContext, DraftView
from headrace_engine.speculation.draft_head import DraftHead
from headrace_engine.speculation.head_pass import HeadPass

Ints = npt.NDArray[np.int64]
Record = Callable[..., StepGraph | None]
"""Makes a graph of a step, the first argument, of a ``kind``; None: it runs eagerly."""

MOST_WAITING = 8
"""Rows of a request that wait for its next guess, at most; others are computed after the step."""

_FEW_ROWS = 256
"""Rows of a step of which a request's few are no reason to keep all."""


class HeadView(DraftView):
    """A worker's requests as the head has come with them: a position is known once the token behind it is.

    Its ``num_computed_tokens`` are positions whose entries the head's caches have.
    """

    @property
    def num_tokens(self) -> Ints:
        """[C]; positions whose next token is known or guessed."""
        found: Ints = self._table.num_tokens + self.num_guessed - 1
        return found


class HeadProposer(ReadsStates):
    """Guesses by a head whose caches are bound.

    Args:
        head: the head.
        context: of the worker.
        led: methods of the head in which other ranks take part.
    """

    def __init__(self, head: DraftHead, context: DraftContext, led: Collection[str] = ()) -> None:
        self.streams = head.streams
        self._head = head
        self._max_len = context.max_len
        self._pass = HeadPass(head, context.with_metadata, context.table.vocab_size, led)
        self._caches = self._pass.has_caches
        self._view = HeadView(context.table)
        self._inputs = context.inputs(self._view)
        self._sampler = context.sampler
        self._device = context.device
        self._waiting: dict[int, list[Tensor]] = {}
        """By row of the table: states [n, W] behind its computed positions."""

    # A table of the worker's, as well: see headrace_engine.execution.requests.RowTable.

    def add(self, row: int, new: NewRequest) -> None:
        """The head has what the model has of a new request."""
        self._view.grow()
        self._view.num_computed_tokens[row] = new.num_computed_tokens
        self._waiting.pop(row, None)

    def remove(self, row: int, request_id: str) -> None:
        """A request has gone."""
        self._waiting.pop(row, None)

    def capture(self, record: Record, largest: int, like: Tensor) -> None:
        """See :meth:`HeadPass.capture`."""
        kind = "steps of the head that guesses"
        self._pass.capture(partial(record, kind=kind, all_rows=False), largest, like)

    @property
    def graph(self) -> StepGraph | None:
        """Runs the passes that fit it; None: all run eagerly."""
        return self._pass.graph

    @graph.setter
    def graph(self, graph: StepGraph | None) -> None:
        self._pass.graph = graph

    @torch.inference_mode()
    def observe(self, states: StepStates) -> None:
        """See :class:`headrace_core.speculation.ReadsStates`."""
        self._view.grow()
        projected = self._head.project(states.hidden, states.streams)
        for request_id, start, count, first in zip(
            states.request_ids, states.starts.tolist(), states.counts.tolist(), states.positions.tolist()
        ):  # fmt: skip
            row = self._view.row_of.get(request_id)
            if row is not None and count:
                part = projected[start : start + count]
                alone = len(projected) > _FEW_ROWS and count <= MOST_WAITING
                self._keep(row, first, part.clone() if alone else part)
        if self._caches:
            self._catch_up(states.request_ids)

    def _keep(self, row: int, first: int, states: Tensor) -> None:
        """Let states of the positions from ``first`` on wait."""
        computed, waiting = self._view.num_computed_tokens, self._waiting.setdefault(row, [])
        if not self._caches:  # the last one says all
            first, states = first + len(states) - 1, states[-1:]
            waiting.clear()
        expected = int(computed[row]) + sum(map(len, waiting))
        if first != expected:  # a step was lost, or nothing waited before
            waiting.clear()
            computed[row] = first
        waiting.append(states)

    def _catch_up(self, request_ids: Sequence[str]) -> None:
        """Compute the rows of requests for which many wait, but for the last one that can be."""
        counts: dict[str, int] = {}
        for request_id in request_ids:
            row = self._view.row_of.get(request_id)
            if row is None or sum(map(len, self._waiting.get(row, ()))) <= MOST_WAITING:
                continue
            count = int(self._view.num_tokens[row] - self._view.num_computed_tokens[row])
            count = min(count, sum(map(len, self._waiting[row]))) - 1
            if count > 0:
                counts[request_id] = count
        if not counts:
            return
        rows = self._rows(counts)
        whole = [torch.cat(self._waiting[row]) for row in rows.tolist()]
        self._run(counts, torch.cat([x[:n] for x, n in zip(whole, counts.values())]), 0)
        for row, states, count in zip(rows.tolist(), whole, counts.values()):
            self._waiting[row] = [states[count:].clone()]  # so that the prompt's states can go
            self._view.num_computed_tokens[row] += count

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Sequence[int]]:
        """See :class:`headrace_core.speculation.DraftProposer`."""
        view, guesses = self._view, {task.request_id: list[int]() for task in tasks}
        view.grow()
        room = {task.request_id: self._room(task) for task in tasks}
        ids = [request_id for request_id, most in room.items() if most > 0]
        rows = self._rows(ids)
        if not ids:
            return list(guesses.values())
        known = view.num_tokens[rows]
        counts = dict(zip(ids, (known - view.num_computed_tokens[rows]).tolist()))
        states = torch.cat([state for row in rows.tolist() for state in self._waiting[row]])
        depth, alive = 0, rows
        try:
            while ids:
                states, logits = self._run(counts, states, depth)
                chosen = self._choose(alive, logits)
                for request_id, token in zip(ids, chosen.tolist()):
                    guesses[request_id].append(token)
                depth += 1
                going = [r for r, request_id in enumerate(ids) if room[request_id] > depth]
                if len(going) < len(ids):
                    ids, alive = [ids[r] for r in going], alive[going]
                    states = states[torch.tensor(going, dtype=torch.int64, device=states.device)]
                counts = dict.fromkeys(ids, 1)
        finally:
            view.num_guessed[rows] = 0
            if self._caches:
                view.num_computed_tokens[rows] = known
                for row in rows.tolist():
                    self._waiting[row] = []
            else:
                view.num_computed_tokens[rows] = known - 1
        return list(guesses.values())

    def _room(self, task: DraftTask) -> int:
        """Guesses to make; 0 if the states are not there that the first is made of."""
        view, row = self._view, self._view.row_of[task.request_id]
        view.num_guessed[row] = 0
        known = int(view.num_tokens[row])
        waiting = sum(map(len, self._waiting.get(row, ())))
        if not waiting or view.num_computed_tokens[row] + waiting != known:
            return 0
        most = task.most if self._head.most is None else min(task.most, self._head.most)
        return min(most, self._max_len - known - 1)

    def _choose(self, rows: Ints, logits: Tensor) -> Ints:
        """[B]: the next token of each, which stands behind its others from now on."""
        view = self._view
        chosen: Ints = self._sampler(logits, view.sampling_batch(rows)).token_ids
        ends = view.num_tokens[rows] + 1
        view.num_computed_tokens[rows] = ends - 1
        view.place(rows, ends, chosen)
        view.num_guessed[rows] += 1
        return chosen

    def _run(self, counts: Mapping[str, int], states: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """The head on so many positions of requests, whose states these are: next states [B, W] and logits
        [B, V] behind the last ones of those that have no known position left."""
        inputs = self._inputs.build(counts)
        batch = inputs.batch
        assert batch is not None
        following = self._view.token_ids[inputs.token_rows, self._positions(inputs) + 1]
        ids = torch.from_numpy(following.astype(np.int64)).to(self._device)
        batch = dataclasses.replace(batch, input_ids=ids)
        return self._pass.run(batch, states, depth, inputs.num_logits)

    def _positions(self, inputs: StepInputs) -> Ints:
        """[T]; places of the tokens in their requests."""
        of_tokens = inputs.token_rows
        starts = np.flatnonzero(np.diff(of_tokens, prepend=-1))
        counts = np.diff(starts, append=len(of_tokens))
        found: Ints = np.arange(len(of_tokens)) + np.repeat(
            inputs.seq_lens - counts - starts, counts
        )
        return found

    def _rows(self, request_ids: Sequence[str] | Mapping[str, int]) -> Ints:
        return np.array([self._view.row_of[i] for i in request_ids], np.int64)
