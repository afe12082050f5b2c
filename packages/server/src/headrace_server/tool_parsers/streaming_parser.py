"""Base of all tool-call formats: content, calls, and what becomes of text that breaks.

A format (a subclass) says with which tags a section of calls opens and closes, and how to read
on behind the opening tag. The parser does the rest, the same for all:

- Outside of sections text is content. White space next to a call belongs to the format.
- From an opening tag until the name and the beginning of the arguments are known, text is held.
  If it breaks there, it is content, opening tag and all, and reading goes on at the character
  that broke it.
- From then on the call is given away as it comes. If it breaks now, what was given stands, and
  the rest is dropped up to the section's closing tag or the next opening one.
- Behind a complete call, what is neither another call nor the closing tag is content again.

None of this looks at the end of the text or at its cuts, so that whole and piecewise reading
agree for every text, well-formed or not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from headrace_core.text import ParsedDelta, ToolCallDelta, ToolCallParser
from headrace_server.parsing.text_scanner import ParseError, Steps, TextScanner, chunks
from headrace_server.tool_parsers.json_values import json_value

MAX_NAME = 256
"""Characters of a function's name; more is no call."""
NOT_IN_NAMES = "<>{}[]()\"'`,;=|\\"
"""Characters that no function's name has: formats of calls use them as tags."""
_OUTSIDE_NAMES = frozenset(NOT_IN_NAMES)


class StreamingParser(ToolCallParser):
    """A format written as steps; see the module."""

    opens: ClassVar[tuple[str, ...]] = ()
    """Marks with which a section of calls begins."""
    closes: ClassVar[tuple[str, ...]] = ()
    """Marks with which it ends; () if it just ends."""
    ignored: ClassVar[tuple[str, str] | None] = None
    """Marks between which no calls are sought: reasoning."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self.source = TextScanner()
        self._run: Steps[None] | None = None
        self._content: list[str] = []
        """Content of this feed."""
        self._space: list[str] = []
        """White space at the end of the content so far."""
        self._calls: list[tuple[int, str | None, list[str]]] = []
        """Pieces of calls of this feed: index, name, arguments."""
        self._num_calls = 0
        self._open = False
        """A call was given away and is not complete."""
        self._after_call = False
        self._owed: tuple[str, ...] = ()
        """Closing tags of a section that went on with text."""

    @abstractmethod
    def calls(self, tag: str) -> Steps[None]:
        """Read a section behind its opening tag.

        Returns behind the section, or raises :class:`ParseError` anywhere.
        """

    def begin(self) -> Steps[None]:
        """Read calls that begin the answer without any tag; nothing by default."""
        yield from ()

    def feed(self, text: str) -> ParsedDelta:
        for chunk in chunks(text):
            self.source.add(chunk)
            self._resume()
        return self._flush()

    def finish(self) -> ParsedDelta:
        self.source.end()
        self._resume()
        if not self._after_call:
            self._content += self._space
        self._space = []
        return self._flush()

    # What formats say

    def next_call(self) -> None:
        """Hold what is read from here on: it belongs to a call that may still turn out to be text."""
        self.source.held = []

    def say(self, *, but: str = "") -> None:
        """Give away what was held as content, but for its end; what follows is held anew."""
        self.emit_content("".join(self.source.held or ()).removesuffix(but))
        self.source.held = []

    def allows(self, name: str) -> bool:
        """True if a function may have this name; text with another is not a call."""
        return is_name(name)

    def open_call(self, name: str) -> None:
        """The call is one: from here on its pieces are given away.

        Raises :class:`ParseError` if the name can be no function's.
        """
        if not self.allows(name):
            raise ParseError
        self.source.held = None
        self._space = []
        self._calls.append((self._num_calls, name, []))
        self._num_calls += 1
        self._open, self._after_call = True, True

    def arguments(self, text: str) -> None:
        """A piece of the open call's arguments."""
        index = self._num_calls - 1
        if not self._calls or self._calls[-1][0] != index:
            self._calls.append((index, None, []))
        self._calls[-1][2].append(text)

    def close_call(self) -> None:
        """The open call's arguments are complete."""
        self._open = False

    def name(self) -> Steps[str]:
        """Read the characters that a name may have, as far as they go. Raises ParseError if none."""
        yield from self.source.space(" ")
        read: list[str] = []
        while len(read) < MAX_NAME and is_name((yield from self.source.peek())):
            read.append(self.source.take(1))
        if not read:
            raise ParseError
        return "".join(read)

    def whole_call(self, name: str, arguments: str) -> None:
        """A call in one piece."""
        self.open_call(name)
        self.arguments(arguments)
        self.close_call()

    def object_arguments(self, name: str) -> Steps[None]:
        """Open a call, and read its arguments: the JSON object that comes next."""
        if (yield from self.source.peek()) != "{":
            raise ParseError
        self.open_call(name)
        yield from json_value(self.source, self.arguments)
        self.close_call()

    # The run

    def _resume(self) -> None:
        if self._run is None:
            self._run = self._main()
        next(self._run, None)

    def _flush(self) -> ParsedDelta:
        delta = ParsedDelta(
            "".join(self._content),
            tool_calls=[ToolCallDelta(i, name, "".join(args)) for i, name, args in self._calls],
        )
        self._content, self._calls = [], []
        return delta

    def _main(self) -> Steps[None]:
        tag = yield from self._section(None)
        while True:
            tag = tag or (yield from self._seek())
            if not tag:
                return
            tag = yield from self._section(tag)

    def _seek(self) -> Steps[str]:
        """Content up to the next opening tag, which is returned; "" at the end."""
        ignored = self.ignored
        begin = (ignored[0],) if ignored else ()
        while True:
            tag = yield from self.source.until(self.opens + self._owed + begin, self.emit_content)
            if tag in self.opens or not tag:
                return tag
            if tag in self._owed:
                self._owed = tuple(owed for owed in self._owed if owed != tag)
            elif ignored:
                self.emit_content(tag)
                self.emit_content((yield from self.source.until(ignored[1:], self.emit_content)))

    def _section(self, tag: str | None) -> Steps[str]:
        """Read a section. Returns the opening tag of the next, if it was come across."""
        before = self._num_calls
        self.source.held = [tag] if tag else []
        self._owed = ()
        try:
            yield from self.begin() if tag is None else self.calls(tag)
        except ParseError:
            if self._num_calls > before:
                self._owed = self.closes
        if self._open:
            return (yield from self._skip())
        held, self.source.held = self.source.held, None
        self.emit_content("".join(held or ()))
        return ""

    def _skip(self) -> Steps[str]:
        """Drop the rest of a broken call."""
        self._open, self._owed = False, ()
        tag = yield from self.source.until(self.opens + self.closes, drop)
        return tag if tag in self.opens else ""

    def emit_content(self, text: str) -> None:
        """Text is content; white space at its end is kept until more comes."""
        said = text.rstrip()
        if said:
            self._content += self._space
            self._content.append(said)
            self._space = []
            self._after_call = False
        if len(said) < len(text):
            self._space.append(text[len(said) :])


def is_name(text: str) -> bool:
    """True if a function may be called so: no white space, brackets or quotes, and not long."""
    return (
        0 < len(text) <= MAX_NAME
        and text.isprintable()
        and " " not in text
        and _OUTSIDE_NAMES.isdisjoint(text)
    )


def drop(text: str) -> None:
    """Takes text that nobody wants."""
