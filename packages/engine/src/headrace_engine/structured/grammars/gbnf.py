"""Grammars in GBNF, llama.cpp's form of EBNF: read into a tree, and written as Lark for llguidance.

Source: llama.cpp's grammars/README.md. Read besides, as other servers read it: rules over several lines,
and any escaped mark of punctuation.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, NoReturn

from headrace_core.grammar import malformed

ROOT = "root"
MAX_DEPTH = 100
"""Groups and repetitions in each other."""
MAX_REPEATS = 1_000_000
"""Largest number in a repetition; what a backend compiles is less."""
LAST_CHARACTER = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
"""Code points that are halves of characters, and are in no text."""

_NAME = re.compile(r"[\w-]+")
_DEFINES = re.compile(r"([\w-]+)[ \t]*::=")
_LARK = re.compile(r"(?m)^\s*(%llguidance\b|[?!]?start\b[^\n:]*:(?!:=))")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_COUNTS = re.compile(r"\{\s*(\d{1,7})\s*(?:(,)\s*(\d{1,7})?\s*)?\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_DIGITS = {"x": 2, "u": 4, "U": 8}
"""Escape -> hexadecimal digits of the code point behind it."""


@dataclass(frozen=True, slots=True, eq=False)
class Characters:
    """One character of these ranges, which are sorted and apart; ends included."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A part of a rule's right side."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """All parts one after the other; none: nothing."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Either:
    """One of the parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeated:
    """The part ``least`` to ``most`` times; None: any number of times."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Lexeme:
    """A part that is written elsewhere and read as one lexeme. No grammar is read as such; grammars are cut
    so (:mod:`headrace_engine.structured.grammars.lexemes`)."""

    index: int


Node = Characters | Text | Reference | Parts | Either | Repeated | Lexeme


class Rule(NamedTuple):
    """A rule's right side."""

    body: Node
    line: int
    """In the source, from 1."""


def is_lark(source: str) -> bool:
    """True if a grammar is written in Lark, not in GBNF: the first line that says anything decides, then
    whether there is a rule ``start``."""
    begin = _SPACE.match(source)
    if begin is not None and _DEFINES.match(source, begin.end()):
        return False
    return _LARK.search(source) is not None


def read(source: str) -> dict[str, Rule]:
    """The rules of a grammar in GBNF.

    Raises:
        RequestError: it is malformed; names line and column.
    """
    return _Reader(source).rules()


def children(node: Node) -> tuple[Node, ...]:
    """The parts directly inside a node."""
    if isinstance(node, (Parts, Either)):
        return node.parts
    return (node.part,) if isinstance(node, Repeated) else ()


def references(node: Node) -> Iterator[str]:
    """Names of the rules that stand in a node."""
    pending = [node]
    while pending:
        found = pending.pop()
        if isinstance(found, Reference):
            yield found.name
        pending += children(found)


def endless(rules: Mapping[str, Rule]) -> Iterator[tuple[str, Rule]]:
    """Rules that no text satisfies: whichever way is taken, it leads to one of them again."""
    left = dict(rules)
    used_by: dict[str, list[str]] = {name: [] for name in rules}
    for name, rule in rules.items():
        for other in set(references(rule.body)):
            used_by[other].append(name)
    pending = list(rules)
    while pending:
        name = pending.pop()
        if name in left and _can_end(left[name].body, left):
            del left[name]
            pending += used_by[name]
    yield from left.items()


def _can_end(node: Node, unknown: Mapping[str, Rule]) -> bool:
    """True if a text satisfies the node without the rules in ``unknown``."""
    if isinstance(node, Reference):
        return node.name not in unknown
    if isinstance(node, Repeated):
        return node.least == 0 or _can_end(node.part, unknown)
    if isinstance(node, Either):
        return any(_can_end(part, unknown) for part in node.parts)
    return all(_can_end(part, unknown) for part in children(node))


class _Reader:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._depth = 0
        self._lines = [0, *(m.end() for m in re.finditer("\n", source))]
        self._used: dict[str, int] = {}
        """Rules that are referred to -> where first."""

    def rules(self) -> dict[str, Rule]:
        found: dict[str, Rule] = {}
        self._space()
        while self._at < len(self._source):
            begin = self._at
            name = _NAME.match(self._source, begin)
            if name is None:
                self._fail(f"expected a rule's name, found {self._here!r}")
            defines = _DEFINES.match(self._source, begin)
            if defines is None:
                self._at = name.end()
                while self._here in (" ", "\t"):
                    self._at += 1
                self._fail(
                    f"expected '::=' behind the rule's name {name[0][:64]!r}, found {self._here!r}"
                )
            if name[0] in found:
                self._fail(
                    f"the rule {name[0][:64]!r} is there already, in line {found[name[0]].line}"
                )
            self._at = defines.end()
            self._space()
            found[name[0]] = Rule(self._either(), self._line(begin))
            if self._at < len(self._source) and self._here == ")":
                self._fail("')' closes no group")
            before = self._source[self._lines[self._line(self._at) - 1] : self._at]
            if before.strip() and self._at < len(self._source):
                self._fail("a rule must begin on a line of its own")
        for name_, at in self._used.items():
            if name_ not in found:
                self._fail(f"there is no rule {name_[:64]!r}", at)
        if ROOT not in found:
            raise malformed("grammar", f"there is no rule {ROOT!r}, with which a grammar begins")
        for name_, rule in endless(found):
            raise malformed(
                "grammar",
                f"line {rule.line}: the rule {name_[:64]!r} never ends, as each of its alternatives needs it "
                "again: must have one that does not",
            )
        return found

    @property
    def _here(self) -> str:
        """The next character, for an error; "" = the end."""
        return self._source[self._at : self._at + 1]

    def _line(self, at: int) -> int:
        return bisect_right(self._lines, at)

    def _fail(self, what: str, at: int | None = None) -> NoReturn:
        at = self._at if at is None else at
        line = self._line(at)
        column = at - self._lines[line - 1] + 1
        what = what.replace("found ''", "found the end")
        raise malformed("grammar", f"line {line} column {column}: {what}")

    def _space(self) -> None:
        found = _SPACE.match(self._source, self._at)
        assert found is not None, "it may match nothing"
        self._at = found.end()

    def _either(self) -> Node:
        parts = [self._parts()]
        while self._here == "|":
            self._at += 1
            self._space()
            parts.append(self._parts())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _parts(self) -> Node:
        parts: list[Node] = []
        while self._here not in ("", "|", ")"):
            if _DEFINES.match(self._source, self._at):
                break
            parts.append(self._repeated(self._one()))
        return parts[0] if len(parts) == 1 else Parts(tuple(parts))

    def _one(self) -> Node:
        match self._here:
            case '"':
                return self._text()
            case "[":
                return self._characters()
            case "(":
                return self._group()
            case ".":
                self._at += 1
                return Characters(characters([(0, LAST_CHARACTER)]))
        name = _NAME.match(self._source, self._at)
        if name is None:
            self._fail(
                f'found {self._here!r}: must be a "text", a [class] of characters, a (group), a rule\'s '
                "name, '.', '|', or one of * + ? {m,n} behind one of these"
            )
        self._used.setdefault(name[0], self._at)
        self._at = name.end()
        return Reference(name[0])

    def _group(self) -> Node:
        begin = self._at
        self._deeper()
        self._at += 1
        self._space()
        found = self._either()
        if self._here != ")":
            self._fail("this group is not closed", begin)
        self._at += 1
        self._depth -= 1
        return found

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"groups and repetitions in each other: must be at most {MAX_DEPTH}")

    def _repeated(self, node: Node) -> Node:
        """The node with the repetitions behind it."""
        depth = self._depth
        self._space()
        while self._here and self._here in "*+?{":
            self._deeper()
            least, most = self._counts()
            node = Repeated(node, least, most) if most != 0 else Parts(())
            self._space()
        self._depth = depth
        return node

    def _counts(self) -> tuple[int, int | None]:
        marks: Mapping[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if self._here in marks:
            self._at += 1
            return marks[self._source[self._at - 1]]
        found = _COUNTS.match(self._source, self._at)
        if found is None:
            self._fail("must be {m}, {m,} or {m,n}, of numbers of at most 7 digits")
        least = int(found[1])
        most = least if found[2] is None else int(found[3]) if found[3] else None
        if max(least, most or 0) > MAX_REPEATS:
            self._fail(f"repetitions must be at most {MAX_REPEATS}")
        if most is not None and most < least:
            self._fail(f"{{{least},{most}}}: the second number must not be less than the first")
        self._at = found.end()
        return least, most

    def _character(self, closing: str, begin: int, what: str) -> str:
        """The next character of a text or class, which may be escaped."""
        if not self._here:
            self._fail(f"this {what} is not closed with {closing}", begin)
        at, character = self._at, self._here
        self._at += 1
        if character != "\\":
            return character
        kind = self._here
        self._at += 1
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        if kind in _DIGITS:
            digits = self._source[self._at : self._at + _DIGITS[kind]]
            if not re.fullmatch(rf"[0-9a-fA-F]{{{_DIGITS[kind]}}}", digits):
                self._fail(f"\\{kind} needs {_DIGITS[kind]} hexadecimal digits", at)
            self._at += len(digits)
            code = int(digits, 16)
            if code > LAST_CHARACTER or SURROGATES[0] <= code <= SURROGATES[1]:
                self._fail(f"\\{kind}{digits} is not a character", at)
            return chr(code)
        if kind.isascii() and kind.isprintable() and not kind.isalnum() and kind.strip():
            return kind
        self._fail(
            f"unknown escape {chr(92) + kind!r}: must be \\n, \\r, \\t, \\xHH, \\uHHHH, \\UHHHHHHHH or \\ "
            "and a mark of punctuation",
            at,
        )

    def _text(self) -> Node:
        begin, text = self._at, []
        self._at += 1
        while self._here != '"':
            text.append(self._character("'\"'", begin, "text"))
        self._at += 1
        return Text("".join(text))

    def _characters(self) -> Node:
        begin = self._at
        self._at += 1
        negated = self._here == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while self._here != "]":
            at = self._at
            first = last = ord(self._character("']'", begin, "class"))
            if self._here == "-" and self._source[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = ord(self._character("']'", begin, "class"))
            if last < first:
                self._fail(
                    f"{self._source[at : self._at]!r}: a range must not end before it begins", at
                )
            ranges.append((first, last))
        self._at += 1
        found = characters(others(ranges) if negated else ranges)
        if not found or (negated and not ranges):
            self._fail("a class must hold at least one character; '.' is any character", begin)
        return Characters(found)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same characters in ranges that are sorted and apart."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined


def others(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """All code points that are not in the ranges."""
    edges = [(-1, -1), *_joined(ranges), (LAST_CHARACTER + 1, LAST_CHARACTER + 1)]
    gaps = [(before[1] + 1, after[0] - 1) for before, after in pairwise(edges)]
    return [(first, last) for first, last in gaps if first <= last]


def characters(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The characters of ranges, for :class:`Characters`: sorted, apart, and without halves of characters."""
    low, high = SURROGATES
    found = []
    for first, last in _joined(ranges):
        parts = [(first, min(last, low - 1)), (max(first, high + 1), last)]
        found += [(a, b) for a, b in parts if a <= b]
    return tuple(found)
