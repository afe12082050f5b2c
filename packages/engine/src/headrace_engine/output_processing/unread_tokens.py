"""Tokens of requests that hand nothing out before their end, kept by step until somebody reads them.

With thousands of such requests a step is one mapping that is put aside; each request takes its tokens out of
many steps at once, when it ends, when it is asked for something, or after :data:`MAX_UNREAD_STEPS`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from typing import NamedTuple, Protocol

MAX_UNREAD_STEPS = 32
"""Steps whose tokens a request takes at once at most, and so the steps that are kept."""


class _KeptStep(NamedTuple):
    tokens: Mapping[str, int]
    timestamp: float


class TokenReader(Protocol):
    """A request that takes its tokens late."""

    unread_since: int
    """Number of steps that were put aside before those that it has not read."""

    def take_unread(self, token_ids: list[int], last_timestamp: float) -> None:
        """Take tokens; the last one came at that time."""
        ...


class UnreadTokens:
    """The tokens of the last steps, and who reads them later. Used from one thread."""

    def __init__(self) -> None:
        self._steps: deque[_KeptStep] = deque(maxlen=MAX_UNREAD_STEPS)
        self._num_steps = 0
        self._readers: dict[str, TokenReader] = {}
        """By core request."""
        self._due: dict[int, list[tuple[str, TokenReader]]] = {}
        """By number of steps: who must have read then; some are gone."""

    def add(self, core_id: str, reader: TokenReader) -> None:
        """Keep a core request's tokens from the next step on."""
        self._readers[core_id] = reader
        reader.unread_since = self._num_steps
        self._plan(core_id, reader)

    def remove(self, core_id: str) -> None:
        """Have a core request's reader read, and keep its tokens no longer. Unknown ids are ignored."""
        if core_id in self._readers:
            self.read(core_id)
            del self._readers[core_id]
            if not self._readers:
                self._steps.clear()
                self._due.clear()

    def remove_all(self) -> None:
        """:meth:`remove` all."""
        for core_id in list(self._readers):
            self.remove(core_id)

    def put_aside(self, tokens: Mapping[str, int], timestamp: float) -> Set[str]:
        """Keep a step's tokens.

        Returns:
            Core requests among them that nobody reads later.
        """
        if not self._readers:
            return tokens.keys()
        self._steps.append(_KeptStep(tokens, timestamp))
        self._num_steps += 1
        for core_id, reader in self._due.pop(self._num_steps, ()):
            if self._readers.get(core_id) is reader:
                self.read(core_id)
                self._plan(core_id, reader)
        return tokens.keys() - self._readers.keys()

    def read(self, core_id: str) -> None:
        """Have a core request's reader read. Unknown ids are ignored."""
        reader, kept = self._readers.get(core_id), self._steps
        if reader is None or reader.unread_since == self._num_steps:
            return
        num_new = self._num_steps - reader.unread_since
        reader.unread_since = self._num_steps
        new = [kept[index] for index in range(len(kept) - num_new, len(kept))]
        token_ids = [step.tokens[core_id] for step in new if core_id in step.tokens]
        if token_ids:
            last = next(step for step in reversed(new) if core_id in step.tokens)
            reader.take_unread(token_ids, last.timestamp)

    def _plan(self, core_id: str, reader: TokenReader) -> None:
        due = self._num_steps + MAX_UNREAD_STEPS
        self._due.setdefault(due, []).append((core_id, reader))
