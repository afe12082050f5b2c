"""The rows of the logits that belong to requests, and how they change from step to step.

Slots are contiguous. A new request takes the lowest slot that has become free, or else the next at
the end; if more have gone than come, the slots that stay empty are filled from the end.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace_core.sampling.logits_processor import (
    AddedRequest,
    BatchUpdate,
    MoveDirectionality,
    MovedRequest,
)
from headrace_core.sampling.params import SamplingParams


class Tracked(NamedTuple):
    """A request that is to get a slot."""

    request_id: str
    params: SamplingParams
    prompt_token_ids: list[int] | None
    """None: the prompt came as embeddings."""
    output_token_ids: list[int]
    """Live: whoever samples appends."""


class SlotTracker:
    """Requests by slot, with the difference since the last step."""

    def __init__(self) -> None:
        self.request_ids: list[str] = []
        """By slot, as of the last :meth:`update`."""
        self._slots: dict[str, int] = {}
        self._gone: list[int] = []
        self._new: list[Tracked] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slots

    def __len__(self) -> int:
        return len(self.request_ids)

    def slot(self, request_id: str) -> int:
        """A request's slot, as of the last :meth:`update`."""
        return self._slots[request_id]

    def remove(self, request_id: str) -> None:
        """A request has gone; ids without a slot are ignored."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._gone.append(slot)

    def add(self, request: Tracked) -> None:
        """A request without a slot gets one at the next :meth:`update`."""
        self._new.append(request)

    def update(self) -> BatchUpdate | None:
        """Carry out what was asked for since the last call; None if that was nothing."""
        if not self._gone and not self._new:
            return None
        free, new = sorted(self._gone), self._new
        self._gone, self._new = [], []
        added: list[AddedRequest] = []
        for request in new:
            slot = free.pop(0) if free else len(self.request_ids)
            if slot == len(self.request_ids):
                self.request_ids.append(request.request_id)
            else:
                self.request_ids[slot] = request.request_id
            self._slots[request.request_id] = slot
            added.append((slot, request.params, request.prompt_token_ids, request.output_token_ids))
        moved = self._condense(free)
        return BatchUpdate(len(self.request_ids), tuple(free), tuple(added), tuple(moved))

    def _condense(self, empty: list[int]) -> list[MovedRequest]:
        """Fill the empty slots, lowest first, from the highest that is occupied."""
        vacant, moved = set(empty), []
        last = len(self.request_ids) - 1
        for target in empty:
            while last in vacant:
                last -= 1
            if last < target:
                break
            request_id = self.request_ids[last]
            self.request_ids[target] = request_id
            self._slots[request_id] = target
            moved.append((last, target, MoveDirectionality.UNIDIRECTIONAL))
            last -= 1
        del self.request_ids[len(self.request_ids) - len(empty) :]
        return moved
