"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """The effect of a piece of text."""

    text: str
    """Text that is certain to be output; on a match, all that is left of it."""
    stop: str | None
    """The stop string that was completed, if one was."""


class StopFinder:
    """Finds the first stop string to be completed, however the text is cut into pieces.

    Of several that are completed by the same character the longest counts. Held back is exactly
    the longest end of the text that a stop string begins with. Linear time: each stop string has a
    Knuth-Morris-Pratt automaton, whose state is the length of that end.

    Args:
        stops: non-empty strings.
        include_stop: leave the match in the text.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._include_stop = include_stop
        self._borders = [_borders(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> StopMatch:
        """Take a piece.

        Args:
            text: follows what was fed before.
            may_stop: False lets matches that this piece completes pass (``min_tokens``).
        """
        if not self._stops:
            return StopMatch(text, None)
        for position, character in enumerate(text):
            stop = self._advance(character)
            if stop is not None and may_stop:
                seen = self._held + text[: position + 1]
                self._held = ""
                return StopMatch(seen if self._include_stop else seen[: -len(stop)], stop)
        seen = self._held + text
        kept = max(self._states, default=0)
        cut = len(seen) - kept
        self._held = seen[cut:]
        return StopMatch(seen[:cut], None)

    def finish(self) -> str:
        """No more text comes: returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Move all automata on; returns the longest stop string that is complete now."""
        found = None
        for index, stop in enumerate(self._stops):
            borders, state = self._borders[index], self._states[index]
            while state and stop[state] != character:
                state = borders[state - 1]
            state += stop[state] == character
            if state == len(stop):
                found = found or stop
                state = borders[state - 1]
            self._states[index] = state
        return found


def _borders(text: str) -> list[int]:
    """For each beginning of the text, the length of its longest proper end that begins it too."""
    borders, size = [0] * len(text), 0
    for position in range(1, len(text)):
        while size and text[position] != text[size]:
            size = borders[size - 1]
        size += text[position] == text[size]
        borders[position] = size
    return borders
