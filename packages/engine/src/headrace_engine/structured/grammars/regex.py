r"""Regexes of the part of their syntax that means the same to everybody, read into the tree of a grammar.

The backends' libraries differ in anchors, in classes such as ``\d`` and ``[[:alpha:]]``, in ``.`` and in
flags; some of them ignore what they do not know. Those that do not take Rust's dialect get the tree that is
read here, written in their own syntax, and refuse what is not read.

Source of the syntax: the page of Rust's crate ``regex``, which guidance and outlines use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NoReturn

from headrace_engine.structured.grammars.gbnf import (
    LAST_CHARACTER,
    SURROGATES,
    Characters,
    Either,
    Node,
    Parts,
    Repeated,
    Text,
    characters,
    children,
    others,
)

MAX_DEPTH = 100
"""Groups in each other."""
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "v": "\v", "f": "\f", "a": "\a"}
_CODE = re.compile(
    r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xuU]\{([0-9a-fA-F]{1,8})\}"
)
_COUNTS = re.compile(r"\{([0-9]{1,7})(?:(,)([0-9]{1,7})?)?\}")
_MARKS = frozenset("\\.+*?()|[]{}^$#&-~/")
"""Characters that stand for themselves behind a backslash."""
_SPACE = ((9, 13), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
          (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000))  # fmt: skip
r"""``\s``: Unicode's property White_Space."""
_SETS = {
    "s": list(_SPACE),
    "S": others(list(_SPACE)),
}
_UNEQUAL = {
    "0": r"\0 is not one of the escapes; write \x00",
    "d": r"\d is any decimal digit of Unicode; write [0-9]",
    "D": r"\D is anything but a decimal digit of Unicode; write [^0-9]",
    "w": r"\w is any letter, digit or connector of Unicode; write [0-9A-Za-z_]",
    "W": r"\W is anything but a letter, digit or connector of Unicode; write [^0-9A-Za-z_]",
}


class NotRead(Exception):
    """A regex is malformed, or uses syntax that is not the same everywhere; says what, and where."""


def read_regex(pattern: str) -> Node:
    """A regex, which matches a text as a whole, as the right side of a rule.

    ``^`` and ``$`` are read at the beginning and the end of an alternative of the whole, where they say
    nothing more; lazy repetitions are repetitions.

    Raises:
        NotRead: see there.
    """
    return _Reader(pattern).whole()


def regex_refusals(pattern: str) -> list[str]:
    """Reasons for which a backend that does not take Rust's dialect cannot serve a regex; [] if it can."""
    try:
        read_regex(pattern)
    except NotRead as reason:
        return [str(reason)]
    return []


def leaves(node: Node) -> Iterator[Text | Characters]:
    """The texts and classes of a tree without references, in no order."""
    pending = [node]
    while pending:
        found = pending.pop()
        if isinstance(found, (Text, Characters)):
            yield found
        else:
            pending += children(found)


def named_ranges(node: Text | Characters) -> list[tuple[int, int]]:
    r"""The code points that a text or class names, as ranges with both ends.

    Classes that hold the last character of Unicode (negated ones, ``.``, ``\S``) name none, and ``\s`` does
    not name its own: they stand for whatever is there.
    """
    if isinstance(node, Text):
        return [(ord(character), ord(character)) for character in node.text]
    ranges = list(node.ranges)
    if ranges[-1][1] == LAST_CHARACTER:
        return []
    if all(any(a <= low and high <= b for a, b in ranges) for low, high in _SPACE):
        return [item for item in ranges if item not in _SPACE]
    return ranges


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def whole(self) -> Node:
        found = self._either()
        if self._at < len(self._pattern):
            self._fail("')' closes no group")
        return found

    @property
    def _here(self) -> str:
        """The next character; "" = the end."""
        return self._pattern[self._at : self._at + 1]

    def _fail(self, what: str, at: int | None = None) -> NoReturn:
        raise NotRead(f"character {(self._at if at is None else at) + 1}: {what}")

    def _either(self) -> Node:
        parts = [self._parts()]
        while self._here == "|":
            self._at += 1
            parts.append(self._parts())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _parts(self) -> Node:
        parts: list[Node] = []
        if self._here == "^" and not self._depth:
            self._at += 1
        while self._here not in ("", "|", ")"):
            following = self._pattern[self._at + 1 : self._at + 2]
            if self._here == "$" and not self._depth and following in ("", "|"):
                self._at += 1
                break
            parts.append(self._repeated(self._one()))
        return parts[0] if len(parts) == 1 else Parts(tuple(parts))

    def _one(self) -> Node:
        character = self._here
        match character:
            case "(":
                return self._group()
            case "[":
                return self._class()
            case ".":
                self._at += 1
                return Characters(characters(others([(10, 10)])))
            case "\\":
                return self._escaped()
            case "^" | "$":
                self._fail(f"{character!r} must begin or end the whole regex")
            case "*" | "+" | "?" | "{":
                self._fail(f"{character!r} repeats nothing")
        self._at += 1
        return Text(character)

    def _group(self) -> Node:
        begin = self._at
        self._at += 1
        if self._pattern.startswith("?:", self._at):
            self._at += 2
        elif self._here == "?":
            self._fail("must be a group ( ) or (?: )", begin)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"groups in each other: must be at most {MAX_DEPTH}")
        found = self._either()
        if self._here != ")":
            self._fail("this group is not closed", begin)
        self._at += 1
        self._depth -= 1
        return found

    def _repeated(self, node: Node) -> Node:
        """The node with the one repetition behind it."""
        if not self._here or self._here not in "*+?{":
            return node
        found = _COUNTS.match(self._pattern, self._at)
        if self._here == "{" and found is None:
            self._fail("must be {m}, {m,} or {m,n}, of numbers of at most 7 digits")
        if found is None:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[self._here]
            self._at += 1
        else:
            least = int(found[1])
            most = least if found[2] is None else int(found[3]) if found[3] else None
            if most is not None and most < least:
                self._fail(f"{found[0]}: the second number must not be less than the first")
            self._at = found.end()
        if self._here == "?":
            self._at += 1
        if self._here and self._here in "*+?{":
            self._fail("a repetition must not be repeated without a group")
        return Parts(()) if most == 0 else Repeated(node, least, most)

    def _escaped(self) -> Node:
        kind = self._pattern[self._at + 1 : self._at + 2]
        if kind and kind in _SETS:
            self._at += 2
            return Characters(characters(_SETS[kind]))
        return Text(self._escape())

    def _escape(self) -> str:
        """The character that the escape at this place stands for."""
        begin = self._at
        kind = self._pattern[begin + 1 : begin + 2]
        self._at += 2
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        if kind and kind in _MARKS:
            return kind
        found = _CODE.match(self._pattern, begin + 1)
        if found is not None:
            code = int(next(filter(None, found.groups())), 16)
            if code > LAST_CHARACTER or SURROGATES[0] <= code <= SURROGATES[1]:
                self._fail(f"\\{found[0]} is not a character", begin)
            self._at = found.end()
            return chr(code)
        self._fail(
            _UNEQUAL.get(kind, f"the escape {chr(92) + kind!r} is not one of its own"), begin
        )

    def _class(self) -> Node:
        begin = self._at
        self._at += 1
        negated = self._here == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        if self._here == "]":
            self._fail("']' must be escaped at the beginning of a class")
        while self._here != "]":
            self._item(ranges, begin)
        self._at += 1
        found = characters(others(ranges) if negated else ranges)
        if not found:
            self._fail("a class must hold at least one character", begin)
        return Characters(found)

    def _item(self, ranges: list[tuple[int, int]], begin: int) -> None:
        """Add a character, a range or an escaped set of a class."""
        at = self._at
        kind = self._pattern[at + 1 : at + 2]
        if self._here == "\\" and kind and kind in _SETS:
            self._at += 2
            ranges += _SETS[kind]
            self._no_range(begin)
            return
        first = last = ord(self._member(begin))
        if self._here == "-" and self._pattern[self._at + 1 : self._at + 2] != "]":
            self._at += 1
            last = ord(self._member(begin))
            self._no_range(begin)
        if last < first:
            self._fail(
                f"{self._pattern[at : self._at]!r}: a range must not end before it begins", at
            )
        ranges.append((first, last))

    def _no_range(self, begin: int) -> None:
        if self._here == "-" and self._pattern[self._at + 1 : self._at + 2] != "]":
            self._fail("'-' must be escaped where it is not between two characters")

    def _member(self, begin: int) -> str:
        """The next character of a class."""
        character = self._here
        if not character:
            self._fail("this class is not closed", begin)
        if character == "\\":
            return self._escape()
        if character == "[":
            self._fail("'[' must be escaped in a class")
        if character in "&~-" and self._pattern[self._at + 1 : self._at + 2] == character:
            self._fail(f"{2 * character!r}: must be escaped in a class")
        self._at += 1
        return character


def as_regex(node: Node) -> str:
    """A tree as a regex of the syntax that Python and Rust share.

    Args:
        node: without references; see :func:`read_regex`.
    """
    if isinstance(node, Text):
        return "".join(map(_written, node.text))
    if isinstance(node, Characters):
        low, high = SURROGATES
        without = [(a, b) for a, b in others(list(node.ranges)) if (a, b) != (low, high)]
        if node.ranges[-1][1] == LAST_CHARACTER and not without:
            return r"(?:.|\n)"
        if node.ranges[-1][1] < LAST_CHARACTER:
            return f"[{_members(node.ranges)}]"
        return f"[^{_members(characters(without))}]"
    if isinstance(node, Repeated):
        most = "" if node.most is None else node.most
        return f"(?:{as_regex(node.part)}){{{node.least},{most}}}"
    assert isinstance(node, (Parts, Either)), "no other parts are read"
    if isinstance(node, Parts):
        return "".join(
            f"(?:{as_regex(part)})" if isinstance(part, Either) else as_regex(part)
            for part in node.parts
        )
    return "|".join(map(as_regex, node.parts))


def _members(ranges: tuple[tuple[int, int], ...]) -> str:
    return "".join(
        _written(chr(a)) if a == b else f"{_written(chr(a))}-{_written(chr(b))}" for a, b in ranges
    )


def _written(character: str) -> str:
    if ord(character) < 0x20 or ord(character) == 0x7F:
        return f"\\x{ord(character):02x}"
    return "\\" + character if character in _MARKS else character
