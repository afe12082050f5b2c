"""Rounds in which every engine that shares experts says a word, and hears those of all.

Engines get the same calls in the same order, so that each counts its rounds alike. An engine may be a round
ahead: it has heard all words of one, and says the next, before another engine has heard them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class Agreement:
    """One engine's part in the rounds of all. Thread-safe.

    Args:
        engine: this one's number.
        num_engines: how many there are.
        tell: tells the other engines the word of this one in the round of that number.
    """

    def __init__(
        self,
        engine: int,
        num_engines: int,
        tell: Callable[[int, str], None] = lambda number, word: None,
    ) -> None:
        self._engine, self._num_engines, self._tell = engine, num_engines, tell
        self._lock = threading.Lock()
        self._next = 0
        self._words: dict[int, dict[int, str]] = {}
        """By round and engine; of rounds whose words have not been taken."""

    def say(self, word: str) -> int:
        """Say a word to all; returns the number of its round."""
        with self._lock:
            number, self._next = self._next, self._next + 1
        self.heard(number, self._engine, word)
        self._tell(number, word)
        return number

    def heard(self, number: int, engine: int, word: str) -> None:
        """An engine said its word in the round of that number."""
        with self._lock:
            self._words.setdefault(number, {})[engine] = word

    def is_complete(self, number: int) -> bool:
        """True if all words of a round have been heard, and not been taken."""
        with self._lock:
            return len(self._words.get(number, {})) == self._num_engines

    def take(self, number: int) -> Sequence[str] | None:
        """The words of a round, by engine; each round's once. None: some have not been heard."""
        with self._lock:
            words = self._words.get(number, {})
            if len(words) < self._num_engines:
                return None
            del self._words[number]
            return [words[engine] for engine in range(self._num_engines)]
