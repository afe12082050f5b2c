"""Tokens of requests that hand nothing out before their end, kept by step until somebody reads them.

With thousands of such requests a step is one mapping that is put aside; each request takes its tokens out of
many steps at once, when it ends, when it is asked for something, or after :data:`MAX_UNREAD_STEPS`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from headrace_engine.token_rows import NO_TOKEN, TokenRows

FEWEST_REQUESTS = 256
"""Requests from which on tokens are kept: those of fewer are handed on one by one in less time."""
MAX_UNREAD_STEPS = 32
"""Steps whose tokens a request takes at once at most, and so the steps that are kept."""


class TokenReader(Protocol):
    """A request that takes its tokens late."""

    unread_since: int
    """Number of steps that were put aside before those that it has not read."""
    unread_column: int
    """Where its tokens are kept."""

    def take_unread(self, token_ids: Sequence[int], last_timestamp: float) -> None:
        """Take tokens; the last one came at that time."""
        ...


class UnreadTokens:
    """The tokens of the last steps, and who reads them later. Used from one thread."""

    def __init__(self) -> None:
        self._rows = TokenRows(MAX_UNREAD_STEPS)
        self._timestamps: deque[float] = deque(maxlen=MAX_UNREAD_STEPS)
        self._readers: dict[str, TokenReader] = {}
        """By core request."""
        self._due: dict[int, list[tuple[str, TokenReader]]] = {}
        """By number of steps: who must have read then; some are gone."""

    def add(self, core_id: str, reader: TokenReader) -> None:
        """Keep a core request's tokens from the next step on."""
        self._readers[core_id] = reader
        reader.unread_since = self._rows.num_steps
        reader.unread_column = self._rows.add(core_id)
        self._plan([(core_id, reader)])

    def remove(self, core_id: str) -> None:
        """Have a core request's reader read, and keep its tokens no longer. Unknown ids are ignored."""
        if core_id in self._readers:
            self.read(core_id)
            del self._readers[core_id]
            self._rows.remove(core_id)
            if not self._readers:
                self._due.clear()

    def remove_all(self) -> None:
        """:meth:`remove` all."""
        for core_id in list(self._readers):
            self.remove(core_id)

    def put_aside(self, tokens: dict[str, int], timestamp: float) -> Iterable[str]:
        """Keep a step's tokens.

        Returns:
            Core requests among them that nobody reads later, in the step's order.
        """
        if not self._readers:
            return tokens
        read_now = self._rows.put(tokens, finds_others=True)
        self._timestamps.append(timestamp)
        due = [
            (core_id, reader)
            for core_id, reader in self._due.pop(self._rows.num_steps, ())
            if self._readers.get(core_id) is reader
        ]
        self._read_each([reader for _, reader in due])
        self._plan(due)
        return read_now

    def read(self, core_id: str) -> None:
        """Have a core request's reader read. Unknown ids are ignored."""
        reader = self._readers.get(core_id)
        if reader is not None and reader.unread_since != self._rows.num_steps:
            self._read_each([reader])

    def _read_each(self, readers: Iterable[TokenReader]) -> None:
        """Have several read: at once those that lack as many steps, as nearly all do."""
        num_steps = self._rows.num_steps
        by_count: dict[int, list[TokenReader]] = {}
        for reader in readers:
            count = num_steps - reader.unread_since
            if count:  # else it is there twice
                reader.unread_since = num_steps
                by_count.setdefault(count, []).append(reader)
        for count, some in by_count.items():
            columns = [reader.unread_column for reader in some]
            for reader, found in zip(some, self._rows.read_each(columns, count)):
                self._hand_over(reader, found)

    def _hand_over(self, reader: TokenReader, found: Sequence[int]) -> None:
        """Give a reader the tokens of the last steps, without those in which it had no part."""
        num_after = 0
        if NO_TOKEN in found:
            while num_after < len(found) and found[-1 - num_after] == NO_TOKEN:
                num_after += 1
            found = [token for token in found if token != NO_TOKEN]
        if found:
            reader.take_unread(found, self._timestamps[-1 - num_after])

    def _plan(self, readers: Sequence[tuple[str, TokenReader]]) -> None:
        """Have these read again while their tokens are still kept."""
        if readers:
            due = self._rows.num_steps + MAX_UNREAD_STEPS
            self._due.setdefault(due, []).extend(readers)
