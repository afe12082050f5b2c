"""JSON as it is being written: where a value ends, without building it.

:class:`JsonScanner` takes any cut of a text and passes on the value's own spelling. What it has
passed on is at each moment the beginning of some valid JSON value (RFC 8259), so what a client
was sent of a broken call's arguments is still a beginning that a partial parser can read. One
liberty: control characters inside strings, which models write and RFC 8259 forbids, come out as
escapes.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from headrace_server.parsing.text_scanner import JSON_SPACE, ParseError, Steps, TextScanner

MAX_DEPTH = 128
"""Deeper nesting is no call."""
MAX_NAME = 512
"""Characters of a key or a name, quotes included; more is no call."""

_CONTROL = {code: json.dumps(chr(code))[1:-1] for code in range(0x20)}
_DIGITS = "0123456789"
_NUMBER = {
    # state -> (characters, next state)...; the state's name says what was read last
    "start": (("-", "minus"), ("0", "zero"), ("123456789", "digits")),
    "minus": (("0", "zero"), ("123456789", "digits")),
    "zero": ((".", "point"), ("eE", "e")),
    "digits": ((_DIGITS, "digits"), (".", "point"), ("eE", "e")),
    "point": ((_DIGITS, "fraction"),),
    "fraction": ((_DIGITS, "fraction"), ("eE", "e")),
    "e": (("+-", "sign"), (_DIGITS, "exponent")),
    "sign": ((_DIGITS, "exponent"),),
    "exponent": ((_DIGITS, "exponent"),),
}
_WHOLE = ("zero", "digits", "fraction", "exponent")
_WORDS = {"t": "true", "f": "false", "n": "null"}

_Handler = Callable[[str, int], int]


class JsonScanner:
    """Reads one JSON value. Feed pieces to :meth:`scan` until it is done or broken."""

    def __init__(self) -> None:
        self.done = False
        """The value is complete."""
        self.broken = False
        """The next character cannot follow in JSON."""
        self._read: _Handler = self._value
        self._stack: list[str] = []
        """The open brackets."""
        self._in_key = False
        self._hex = 0
        """Hexadecimal digits of an escape that are still to come."""
        self._word = ""
        """Rest of true, false or null."""
        self._number = ""
        """A state of :data:`_NUMBER`."""

    def scan(self, text: str) -> tuple[int, str]:
        """Read on. Returns how many characters belong to the value, and their spelling."""
        at, out = 0, []
        while at < len(text) and not self.done and not self.broken:
            read, start = self._read, at
            at = read(text, at)
            piece = text[start:at]
            if read == self._string and not piece.isprintable():
                piece = piece.translate(_CONTROL)
            out.append(piece)
        return at, "".join(out)

    @property
    def in_string(self) -> bool:
        """True if the text read so far ends within a string, so that any text may follow."""
        return self._read == self._string and not (self.done or self.broken)

    def finish(self) -> bool:
        """True if the value is complete if no more text comes."""
        return self.done or (not self._stack and self._number in _WHOLE)

    def _break(self, at: int) -> int:
        self.broken = True
        return at

    def _value(self, text: str, at: int) -> int:
        character = text[at]
        if character in JSON_SPACE:
            return at + 1
        if character == '"':
            self._read, self._in_key = self._string, False
        elif character in "{[":
            if len(self._stack) == MAX_DEPTH:
                return self._break(at)
            self._stack.append(character)
            self._read = self._key_or_end if character == "{" else self._item_or_end
        elif character in _WORDS:
            self._read, self._word = self._in_word, _WORDS[character][1:]
        else:
            self._number = "start"
            self._read = self._in_number
            return self._in_number(text, at)
        return at + 1

    def _item_or_end(self, text: str, at: int) -> int:
        if text[at] == "]":
            return self._close(at)
        if text[at] not in JSON_SPACE:
            self._read = self._value
            return self._value(text, at)
        return at + 1

    def _key_or_end(self, text: str, at: int) -> int:
        if text[at] == "}":
            return self._close(at)
        return self._key(text, at)

    def _key(self, text: str, at: int) -> int:
        if text[at] == '"':
            self._read, self._in_key = self._string, True
        elif text[at] not in JSON_SPACE:
            return self._break(at)
        return at + 1

    def _colon(self, text: str, at: int) -> int:
        if text[at] == ":":
            self._read = self._value
        elif text[at] not in JSON_SPACE:
            return self._break(at)
        return at + 1

    def _next(self, text: str, at: int) -> int:
        """After a value inside brackets."""
        character, inside = text[at], self._stack[-1]
        if character == ",":
            self._read = self._key if inside == "{" else self._value
        elif character == ("}" if inside == "{" else "]"):
            return self._close(at)
        elif character not in JSON_SPACE:
            return self._break(at)
        return at + 1

    def _close(self, at: int) -> int:
        self._stack.pop()
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self.done = not self._stack
        self._read, self._number = self._next, ""

    def _string(self, text: str, at: int) -> int:
        """Up to and with the next quote or backslash."""
        quote = text.find('"', at)
        end = quote if quote >= 0 else len(text)
        escape = text.find("\\", at, end)
        if escape >= 0:
            self._read = self._escape
            return escape + 1
        if quote < 0:
            return end
        if self._in_key:
            self._read = self._colon
        else:
            self._end_value()
        return quote + 1

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._read, self._hex = self._unicode, 4
        elif text[at] in '"\\/bfnrt':
            self._read = self._string
        else:
            return self._break(at)
        return at + 1

    def _unicode(self, text: str, at: int) -> int:
        if text[at] not in "0123456789abcdefABCDEF":
            return self._break(at)
        self._hex -= 1
        if not self._hex:
            self._read = self._string
        return at + 1

    def _in_word(self, text: str, at: int) -> int:
        if text[at] != self._word[0]:
            return self._break(at)
        self._word = self._word[1:]
        if not self._word:
            self._end_value()
        return at + 1

    def _in_number(self, text: str, at: int) -> int:
        for characters, state in _NUMBER[self._number]:
            if text[at] in characters:
                self._number = state
                return at + 1
        if self._number not in _WHOLE:
            return self._break(at)
        self._end_value()
        return at


def json_value(
    source: TextScanner, put: Callable[[str], object], *, limit: int | None = None
) -> Steps[None]:
    """Read the JSON value that comes next, and give its spelling to ``put`` as it comes.

    Raises ParseError where it stops being JSON, or after ``limit`` characters; what came before was
    given to ``put``.
    """
    scanner = JsonScanner()
    room = limit
    while not scanner.done:
        window = yield from source.window()
        count, spelling = scanner.scan(window[:room])
        source.take(count)
        if spelling:
            put(spelling)
        if room is not None:
            room -= count
        if scanner.broken or (room == 0 and not scanner.done):
            raise ParseError


def json_object(source: TextScanner, put: Callable[[str], object]) -> Steps[None]:
    """As :func:`json_value`. Raises ParseError at once if no object comes next."""
    if (yield from source.peek()) != "{":
        raise ParseError
    yield from json_value(source, put)


def json_string(source: TextScanner) -> Steps[str]:
    """Read a short JSON string, and return what it says. Raises ParseError if none comes next."""
    if (yield from source.peek()) != '"':
        raise ParseError
    pieces: list[str] = []
    yield from json_value(source, pieces.append, limit=MAX_NAME)
    text: str = json.loads("".join(pieces))
    return text
