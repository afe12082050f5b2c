"""Blocks at the connectors of all ranks, as the scheduler sees them: one is there if all of its parts are.

Rank 0's connector is asked at once. The other ranks are asked by message, beside the steps, for each request
that comes to the head of the queue; it waits for their answers as for blocks that are fetched. What was said
may be wrong by the time that a step loads: then the load fails on one rank, and so on all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from headrace_engine.kv_transfer.calls import FIND, FORGET
from headrace_engine.kv_transfer.rank_blocks import Blocks, RankBlocks

logger = logging.getLogger(__name__)

Ask = Callable[[str, Sequence[Any]], list[Future[Any]]]
"""Calls a method of each other rank's worker, beside the passes; results by rank from 1."""


@dataclass(slots=True, eq=False)
class _Question:
    """One request's, to the other ranks."""

    blocks: Blocks
    params: Mapping[str, Any]
    answers: list[Future[Any]]
    own_waits: bool = True
    there: dict[int, frozenset[bytes]] = field(default_factory=dict)
    """By index of a rank that has answered: blocks of which it has its parts."""


class WholeBlocks:
    """Used from the scheduler's thread.

    Args:
        own: rank 0's.
        ask: asks the other ranks; None: there are none.
    """

    def __init__(self, own: RankBlocks, ask: Ask | None = None) -> None:
        self._own, self._ask = own, ask
        self._questions: dict[str, _Question] = {}
        self._there: dict[str, frozenset[bytes]] = {}
        """By request: blocks of which all other ranks have their parts."""
        self._warned = False

    @property
    def are_divided(self) -> bool:
        """True if other ranks have parts."""
        return self._ask is not None

    def contains(self, key: bytes, group: int, request_id: str) -> bool:
        """True if a block is known to be there in whole, for a request."""
        if self._ask is not None and key not in self._there.get(request_id, ()):
            return False
        return self._own.contains(key, group)

    def fetch(self, request_id: str, blocks: Blocks, params: Mapping[str, Any]) -> bool:
        """As :meth:`~headrace_core.kv.KVConnector.fetch`, of all ranks; blocks that may be there are looked
        for, too."""
        if self._ask is None:
            return self._own.fetch(request_id, blocks, params)
        question = self._questions.get(request_id)
        if question is None:
            question = self._questions[request_id] = _Question(
                blocks, params, self._find(request_id, blocks, params)
            )
        if question.own_waits:
            question.own_waits = self._own.fetch(request_id, blocks, params)
        self._hear(request_id, question)
        if question.own_waits or len(question.there) < len(question.answers):
            return True
        del self._questions[request_id]
        self._there[request_id] = frozenset.intersection(*question.there.values())
        return False

    def forget(self, request_id: str) -> None:
        """As :meth:`~headrace_core.kv.KVConnector.forget`, of all ranks."""
        self._own.forget(request_id)

    def left(self, request_id: str) -> None:
        """A request has left the queue, whatever was asked for it."""
        asked = self._questions.pop(request_id, None) is not None
        asked = self._there.pop(request_id, None) is not None or asked
        if asked and self._ask is not None:
            self._ask(FORGET, [request_id])

    def address(self) -> Mapping[str, Any]:
        """Of rank 0's connector, from which other engines know the other ranks'."""
        return self._own.address()

    def _find(
        self, request_id: str, blocks: Blocks, params: Mapping[str, Any]
    ) -> list[Future[Any]]:
        assert self._ask is not None
        return self._ask(FIND, [request_id, dict(blocks), dict(params)])

    def _hear(self, request_id: str, question: _Question) -> None:
        """Take what has been answered; ask again who still fetches."""
        again = False
        for index, answer in enumerate(question.answers):
            if index in question.there or not answer.done():
                continue
            found = self._result(answer)
            if found is None:
                again = True
            else:
                question.there[index] = frozenset(found)
        if again and all(answer.done() for answer in question.answers):
            question.answers = self._find(request_id, question.blocks, question.params)

    def _result(self, answer: Future[Any]) -> Sequence[bytes] | None:
        """Blocks that a rank has; None: it still fetches."""
        error = answer.exception()
        if error is None:
            found: Sequence[bytes] | None = answer.result()
            return found
        level = logging.DEBUG if self._warned else logging.WARNING
        logger.log(level, "KV transfer: a rank could not look for blocks: %s", error)
        self._warned = True
        return ()
