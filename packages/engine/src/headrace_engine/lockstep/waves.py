"""Waves: stretches of passes that engines which share experts run together.

While any engine has work, all run passes, one after the other; an engine without work runs empty ones. A
pass in which no engine has a token ends the wave: all see it in that pass, and rest. The first engine that
has work again begins the next wave, and says so to the others, with the wave's number: what is said of a wave
that has ended meanwhile has no effect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Waves:
    """Where one engine is in the waves of all. Thread-safe.

    Args:
        tell: tells the other engines that the wave of that number begins.
    """

    def __init__(self, tell: Callable[[int], None] = lambda number: None) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._number = 0
        """Of the wave that runs, or else of the next one."""
        self._runs = False
        self._wanted = -1
        """The latest wave that another engine has begun, as far as is known."""

    @property
    def number(self) -> int:
        """Number of the wave that runs, or else of the next one."""
        return self._number

    @property
    def is_due(self) -> bool:
        """True if a pass must be run, be it an empty one."""
        with self._lock:
            return self._runs or self._wanted >= self._number

    def enter(self) -> None:
        """This engine begins a pass; if it rested, a wave begins. Before it waits for the others."""
        with self._lock:
            begins, self._runs = not self._runs, True
            number = self._number
        if begins and self._wanted < number:
            self._tell(number)

    def rest(self) -> None:
        """No engine had a token in the pass that this one has run: the wave has ended."""
        with self._lock:
            self._runs = False
            self._number += 1

    def begun(self, number: int) -> None:
        """Another engine has begun the wave of that number."""
        with self._lock:
            self._wanted = max(self._wanted, number)
