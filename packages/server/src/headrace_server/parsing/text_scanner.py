"""The text of an answer as a cursor sees it, while it is still being written.

Formats are written as plain steps, one after the other (``yield from source.expect("<x>")``), and
wait inside a step when the text so far does not decide it. What a step decides never depends on
where the text was cut, so neither does any format built of steps.

Steps read every character once and keep no more unread text than the longest tag, so time is
linear in the length of the text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a format: waits for text by yielding, returns what it read."""

JSON_SPACE = " \t\r\n"
_CHUNK = 4096
"""Characters that are looked at together: bounds what a search for a tag can cost."""


class ParseError(Exception):
    """The text does not go on as the format says. What was unread is still unread."""


class TextScanner:
    """Unread text, and what was read of a possible call."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self.held: list[str] | None = None
        """Text that was read since a possible call began; None outside of one."""

    def add(self, text: str) -> None:
        """More text came."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more text comes."""
        self._ended = True

    def take(self, count: int) -> str:
        """Read ``count`` characters that are there."""
        text = self._text[self._at : self._at + count]
        self._at += count
        if self.held is not None:
            self.held.append(text)
        return text

    def window(self) -> Steps[str]:
        """All unread text, at least one character. Raises ParseError at the end."""
        while self._at == len(self._text):
            if self._ended:
                raise ParseError
            yield
        return self._text[self._at :]

    def peek(self) -> Steps[str]:
        """The next character, left unread; "" at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def space(self, characters: str = JSON_SPACE) -> Steps[str]:
        """Read characters of a kind, if there are any."""
        read = []
        while (character := (yield from self.peek())) and character in characters:
            read.append(self.take(1))
        return "".join(read)

    def accept(self, *literals: str) -> Steps[str]:
        """Read the one of the literals that comes next; "" if none does.

        No literal may be the beginning of another.
        """
        while True:
            for literal in literals:
                if self._text.startswith(literal, self._at):
                    return self.take(len(literal))
            rest = self._text[self._at : self._at + _facts(literals)[0]]
            if self._ended or not any(literal.startswith(rest) for literal in literals):
                return ""
            yield

    def expect(self, *literals: str) -> Steps[str]:
        """As :meth:`accept`. Raises ParseError if none comes; what begins one at the end is read."""
        found = yield from self.accept(*literals)
        if found:
            return found
        rest = self._text[self._at :]
        if self._ended and any(literal.startswith(rest) for literal in literals):
            self.take(len(rest))
        raise ParseError

    def until(self, tags: tuple[str, ...], put: Callable[[str], object]) -> Steps[str]:
        """Give ``put`` the text before the first tag, as it comes, and read the tag.

        Returns the tag; "" at the end. No tag may be the beginning of another. Text that may
        turn out to begin a tag is kept until it is decided.
        """
        while True:
            start, tag = self._find(tags)
            if start > self._at:
                put(self.take(start - self._at))
            if tag:
                return self.take(len(tag))
            if self._ended:
                if self._at < len(self._text):
                    put(self.take(len(self._text) - self._at))
                return ""
            yield

    def before(self, tags: tuple[str, ...], *, limit: int) -> Steps[tuple[str, str]]:
        """The text before the first tag, and the tag, read.

        Raises ParseError at the end, or after ``limit`` characters if the tag does not follow.
        """
        read: list[str] = []
        room = limit
        while True:
            start, tag = self._find(tags)
            count = start - self._at
            read.append(self.take(min(count, room)))
            if count > room:
                raise ParseError
            room -= count
            if tag:
                return "".join(read), self.take(len(tag))
            if self._ended:
                raise ParseError
            yield

    def _find(self, tags: tuple[str, ...]) -> tuple[int, str]:
        """Where the first tag is, or may be: (its position, the tag or "")."""
        text, best, found = self._text, len(self._text), ""
        for tag in tags:
            at = text.find(tag, self._at, best + len(tag) - 1 if found else best)
            if at >= 0 and (not found or at < best):
                best, found = at, tag
        longest, beginnings = _facts(tags)
        for at in range(max(self._at, len(text) - longest + 1), best):
            if text[at] in beginnings and any(tag.startswith(text[at:]) for tag in tags):
                return at, ""
        return best, found


def chunks(text: str) -> Iterator[str]:
    """``text`` in pieces, each to be added and read before the next.

    A search for several tags looks through all that is there for each of them; without a bound,
    a long text full of one tag would be searched to its end for the others again and again.
    """
    return (text[at : at + _CHUNK] for at in range(0, len(text), _CHUNK))


@functools.lru_cache(maxsize=256)
def _facts(tags: tuple[str, ...]) -> tuple[int, frozenset[str]]:
    """Length of the longest, and the characters with which they begin."""
    return max(map(len, tags), default=0), frozenset(tag[0] for tag in tags)
