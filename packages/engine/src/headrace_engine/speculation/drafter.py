"""The worker's guesses: who is asked for some, how many are checked, and what became of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace_core.speculation import DraftProposer, DraftTask
from headrace_core.step import NewRequest, RequestStepResult
from headrace_engine.execution.requests import RequestTable
from headrace_engine.speculation.depth import Acceptance, StepCosts, limit

logger = logging.getLogger(__name__)

_FAILURES = (Exception, SystemExit, KeyboardInterrupt)
"""Exceptions of proposers that end guessing only. The last two would end the worker's thread."""
_STEPS_UNASKED = 128
"""Steps after which guesses that take time are made though they did not pay."""


class _Follower(NamedTuple):
    """A request's part of the drafter."""

    stop_token_ids: frozenset[int]
    acceptance: Acceptance


class Drafter:
    """Guesses of one worker. One thread only.

    Args:
        proposer: makes them.
        table: the worker's requests.
        adapts: check only as many as are worth their time; False: all.
        takes_time: each guess costs time: with ``adapts``, no more are asked for than are likely right.
        allows: True if guesses of a row may be checked now; None: all. What is right of them is computed
            again then, unless all are
            (:mod:`~headrace_engine.speculation.state_turns`).
    """

    def __init__(
        self,
        proposer: DraftProposer,
        table: RequestTable,
        *,
        adapts: bool,
        takes_time: bool = False,
        allows: Callable[[int], bool] | None = None,
    ) -> None:
        self._proposer: DraftProposer | None = proposer
        self._table = table
        self._adapts, self._takes_time, self._allows = adapts, takes_time, allows
        self._seconds = 0.0
        """Time that the step's guesses took to make."""
        self._num_unasked = 0
        """Steps for which guesses would not have paid."""
        self._requests: dict[str, _Follower] = {}
        self._costs = StepCosts()

    def add(self, row: int, new: NewRequest) -> None:
        """A request was taken in."""
        self._requests[new.request_id] = _Follower(new.request.stop_token_ids, Acceptance())

    def remove(self, row: int, request_id: str) -> None:
        """A request has gone; its row still holds its tokens."""
        if self._requests.pop(request_id, None) is None or self._proposer is None:
            return
        table = self._table
        if row in table.broken:
            return
        try:
            self._proposer.finish(request_id, self._tokens(row), int(table.num_prompt_tokens[row]))
        except _FAILURES:
            self._give_up()

    def drafts(self, most: Mapping[str, int], num_tokens: int) -> dict[str, list[int]]:
        """Guesses to check in a step, by request; those that have none are left out.

        Args:
            most: by request: how many the step has room for.
            num_tokens: of the step without guesses.
        """
        start, self._seconds = time.perf_counter(), 0.0
        tasks = [
            task for request_id, room in most.items() if (task := self._task(request_id, room))
        ]
        asks_anyway = False
        if self._adapts and self._takes_time:  # what is not worth its time is not made
            cuts = self._cuts(tasks, [task.most for task in tasks], num_tokens)
            asks_anyway = not any(cuts) and self._asks_anyway(num_tokens)
            if not asks_anyway:
                tasks = [task._replace(most=cut) for task, cut in zip(tasks, cuts) if cut]
        if not tasks or self._proposer is None:
            return {}
        try:
            proposed = zip(tasks, self._proposer.propose(tasks), strict=True)
            taken = [(task, list(islice(guess, task.most))) for task, guess in proposed]
            guesses = [self._usable(task, guess) for task, guess in taken]
        except _FAILURES:
            self._give_up()
            return {}
        self._seconds = time.perf_counter() - start
        if self._adapts and not asks_anyway:
            cuts = self._cuts(tasks, list(map(len, guesses)), num_tokens)
            guesses = [guess[:cut] for guess, cut in zip(guesses, cuts)]
        return {task.request_id: guess for task, guess in zip(tasks, guesses) if guess}

    def _cuts(self, tasks: Sequence[DraftTask], counts: list[int], num_tokens: int) -> list[int]:
        """How many of so many guesses each task is worth."""
        rates = [self._requests[task.request_id].acceptance for task in tasks]
        return limit(self._costs, num_tokens, counts, rates, again=self._allows is not None)

    def _asks_anyway(self, num_tokens: int) -> bool:
        """True now and then: what guesses cost is measured again."""
        self._num_unasked += self._costs.knows(num_tokens)
        return self._num_unasked % _STEPS_UNASKED == _STEPS_UNASKED - 1

    def record(
        self,
        drafts: Mapping[str, Sequence[int]],
        results: Mapping[str, RequestStepResult],
        num_tokens: int,
        seconds: float,
        *,
        num_again: int = 0,
    ) -> None:
        """A step without prompts has ended; ``num_tokens`` count neither guesses nor the ``num_again`` tokens
        that it has computed again."""
        num_guesses = sum(map(len, drafts.values())) + num_again
        self._costs.record(num_tokens, num_guesses, seconds + self._seconds)
        for request_id, guess in drafts.items():
            result, follower = results.get(request_id), self._requests.get(request_id)
            if result is not None and follower is not None:
                follower.acceptance.record(len(guess), max(len(result.token_ids) - 1, 0))

    def _task(self, request_id: str, room: int) -> DraftTask | None:
        """None: the request is not asked for guesses now."""
        table = self._table
        row, follower = table.row_of.get(request_id), self._requests.get(request_id)
        if row is None or follower is None or row in table.failures:
            return None
        constraint = table.sampling.constraints.get(row)
        if constraint is not None and constraint.is_slow:
            return None
        if self._adapts and follower.acceptance.rests():
            return None
        if self._allows is not None and not self._allows(row):
            return None
        if self._adapts and self._takes_time:
            room = min(room, follower.acceptance.likely_right())
        return DraftTask(request_id, self._tokens(row), int(table.num_prompt_tokens[row]), room)

    def _tokens(self, row: int) -> npt.NDArray[np.int32]:
        """A request's tokens, which the proposer cannot change."""
        tokens = self._table.token_ids[row, : int(self._table.num_tokens[row])]
        tokens.flags.writeable = False
        return tokens

    def _usable(self, task: DraftTask, guess: Sequence[int]) -> list[int]:
        """The guesses before the first that ends the output, or is no token."""
        stops, found = self._requests[task.request_id].stop_token_ids, []
        for token in guess:
            if not 0 <= token < self._table.vocab_size or token in stops:
                break
            found.append(int(token))
        return found

    def _give_up(self) -> None:
        logger.exception("the draft proposer failed: nothing is guessed any more")
        self._proposer = None
