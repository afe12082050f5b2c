"""Rows whose logits are there before their constraint's mask: their tokens are sampled later."""

from __future__ import annotations

from collections.abc import Container
from concurrent.futures import FIRST_COMPLETED, wait
from typing import NamedTuple

from torch import Tensor

from headrace_core.step import NewRequest
from headrace_engine.structured.matching import RowConstraint

IDLE_WAIT = 0.005
"""Longest wait for a mask in a step that computes nothing, in seconds: so long may a new request
have to wait."""


class LateRow(NamedTuple):
    """A row that gets its token when its constraint is matched."""

    request_id: str
    row: int
    """Index in the request table."""
    logits: Tensor
    """[1, V], any floating dtype; its own memory."""
    constraint: RowConstraint


class LateRows:
    """The late rows of one worker. One thread only."""

    def __init__(self) -> None:
        self.rows: dict[str, LateRow] = {}
        """By request."""

    def add(self, row: int, new: NewRequest) -> None:
        """A new request has no late token."""

    def keep(self, row: LateRow) -> None:
        """Remember a row until it is taken or forgotten."""
        self.rows[row.request_id] = row

    def remove(self, row: int, request_id: str) -> None:
        """The request is gone."""
        self.rows.pop(request_id, None)

    def overdue(self, scheduled: Container[str]) -> list[LateRow]:
        """Take the rows of requests that are scheduled again, and wait for their masks."""
        found = [row for request_id, row in self.rows.items() if request_id in scheduled]
        return self._taken(found)

    def matched(self, scheduled: Container[str], *, wait_for_one: bool = False) -> list[LateRow]:
        """Take the rows whose masks are there.

        Args:
            scheduled: requests of this step, whose rows stay: their results say that they are late.
            wait_for_one: if there is none, wait for one, at most :data:`IDLE_WAIT`.
        """
        rows = [row for request_id, row in self.rows.items() if request_id not in scheduled]
        pending = [row.constraint.matching for row in rows if row.constraint.matching is not None]
        if wait_for_one and len(pending) == len(rows):
            wait(pending, IDLE_WAIT, FIRST_COMPLETED)
        return self._taken(
            [row for row in rows if not (job := row.constraint.matching) or job.done()]
        )

    def _taken(self, rows: list[LateRow]) -> list[LateRow]:
        for row in rows:
            row.constraint.settle()
            del self.rows[row.request_id]
        return rows
