"""Responses that are kept, within bounds: how many, how many bytes, how long.

Everything here belongs to an owner (who sent which key): an id alone opens nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace_core.errors import RequestError

MAX_LOG_BYTES = 8 * 1024 * 1024
"""Bytes of one response's events; older ones are dropped."""


@dataclass(eq=False)
class StoredResponse:
    """One response: what it says now, its events, and what a next one continues."""

    id: str
    owner: str
    background: bool = False
    response: dict[str, Any] = field(default_factory=dict)
    """The newest state of the response object."""
    input_items: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation as chat messages, without instructions."""
    cancel: Callable[[], None] | None = None
    """Ends a run that is under way."""
    ended: bool = False
    num_bytes: int = 0
    touched: float = 0.0
    """When it was last used, by the store's clock."""
    _log: list[bytes] = field(default_factory=list)
    _log_bytes: int = 0
    _first: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def running(self) -> bool:
        return self.background and not self.ended

    @property
    def has_log(self) -> bool:
        """True if it can be streamed again."""
        return bool(self._log)

    def append(self, data: bytes) -> None:
        """Keep the next event. The last :data:`MAX_LOG_BYTES` are kept."""
        self._log.append(data)
        self._log_bytes += len(data)
        while self._log_bytes > MAX_LOG_BYTES and len(self._log) > 1:
            self._log_bytes -= len(self._log.pop(0))
            self._first += 1
        self._wake()

    def end(self) -> None:
        """Nothing more comes."""
        self.ended, self.cancel = True, None
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def measure(self) -> int:
        """Its size in bytes, encoded."""
        kept = (self.response, self.input_items, self.messages)
        self.num_bytes = len(msgspec.json.encode(kept)) + self._log_bytes
        return self.num_bytes

    def check_number(self, after: int) -> None:
        """Raises RequestError if events after that number are no longer kept."""
        if after + 1 < self._first:
            raise RequestError(
                f"starting_after = {after}: events before {self._first} are no longer kept",
                param="starting_after",
            )

    async def wait_end(self) -> None:
        """Until nothing more comes."""
        while not self.ended:
            await self._changed.wait()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """The events after a number, and those that are still to come.

        Raises:
            RequestError: the reader was so slow that its next event is gone.
        """
        position = after + 1
        while True:
            self.check_number(position - 1)
            while position - self._first < len(self._log):
                yield self._log[position - self._first]
                position += 1
                self.check_number(position - 1)
            if self.ended:
                return
            await self._changed.wait()


class ResponseStore:
    """Keeps records by owner and id; forgets the least recently used.

    Args:
        max_count, max_bytes, max_age: bounds; age in seconds since the last use. Responses that
            still run are not forgotten; their number is bounded by who starts them.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        max_count: int,
        max_bytes: int,
        max_age: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_count, self._max_bytes, self._max_age = max_count, max_bytes, max_age
        self._clock = clock
        self._records: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: StoredResponse) -> None:
        """Keep a record. Its id must be new for its owner (:meth:`has`)."""
        assert (record.owner, record.id) not in self._records
        record.touched = self._clock()
        self._records[record.owner, record.id] = record
        self.num_bytes += record.measure()
        self._trim()

    def has(self, owner: str, response_id: str) -> bool:
        return (owner, response_id) in self._records

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """The owner's record; None: unknown, forgotten, or another's."""
        self._trim()
        record = self._records.get((owner, response_id))
        if record is not None:
            record.touched = self._clock()
            self._records.move_to_end((owner, response_id))
        return record

    def update(self, record: StoredResponse) -> None:
        """A record has changed: count its bytes again."""
        if self._records.get((record.owner, record.id)) is record:
            self.num_bytes -= record.num_bytes
            self.num_bytes += record.measure()
            self._trim()

    def remove(self, record: StoredResponse) -> None:
        """Forget a record."""
        if self._records.pop((record.owner, record.id), None) is record:
            self.num_bytes -= record.num_bytes

    def _trim(self) -> None:
        oldest = self._clock() - self._max_age
        for record in [r for r in self._ended() if r.touched < oldest]:
            self.remove(record)
        surplus = self._ended()
        while surplus and self._over():
            self.remove(surplus.pop(0))

    def _ended(self) -> list[StoredResponse]:
        """Records that may be forgotten, the least recently used first."""
        return [r for r in self._records.values() if not r.running]

    def _over(self) -> bool:
        return len(self._records) > self._max_count or self.num_bytes > self._max_bytes
