"""Writes a grammar as Lark, the form that llguidance reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from headrace_engine.structured.grammars.gbnf import (
    ROOT,
    Characters,
    Lexeme,
    Node,
    Parts,
    Reference,
    Repeated,
    Rule,
    Text,
    children,
    is_lark,
    read,
)
from headrace_engine.structured.grammars.lark_reader import check_end
from headrace_engine.structured.grammars.lexemes import LexemePlan, lexeme_plan
from headrace_engine.structured.grammars.recursion import with_loops

_MAX_PARENTHESES = 16


class Lark(NamedTuple):
    """A grammar as Lark."""

    text: str
    lines: tuple[int, ...]
    """For each of its lines, the line in the source of the rule that it comes from; (): it is the source."""


def as_lark(source: str, *, cut: bool = True) -> Lark:
    """A grammar in GBNF (``root ::= ...``) or Lark, as Lark.

    Args:
        source: the grammar.
        cut: cut lexemes where they would be too long; False: some texts of a grammar in GBNF may be refused.

    Raises:
        RequestError: it is neither, or never ends; names line and column.
    """
    if is_lark(source):
        check_end(source)
        return Lark(source, ())
    return to_lark(read(source), cut=cut)


def to_lark(rules: Mapping[str, Rule], *, cut: bool = True) -> Lark:
    """A grammar in GBNF as Lark, with ``root`` as ``start``; see :func:`as_lark`.

    Args:
        rules: all that are referred to, and :data:`ROOT`.
        cut: see there.
    """
    rules = {name: with_loops(name, rule) for name, rule in rules.items()}
    return _Writer(rules, lexeme_plan(rules, cut=cut)).lark()


class _Writer:
    """Writes a plan as Lark: rules in lower case, lexemes in upper case."""

    def __init__(self, rules: Mapping[str, Rule], plan: LexemePlan) -> None:
        self._source = rules
        self._plan = plan
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._terminals: list[str] = []
        """Regular rules that lexemes refer to; grows while these are written."""
        self._lines: list[tuple[int, str]] = []
        self._deep: list[tuple[str, Node]] = []
        """Parts of the rule that is written, by the names that they get."""
        self._num_deep = 0

    def lark(self) -> Lark:
        for name, place in self._plan.rules.items():
            self._add(self._source[name].line, self._rule(name), place)
        for index, node in enumerate(self._plan.lexemes):
            if not isinstance(node, (Characters, Text)):
                self._add(self._plan.lines[index], f"L{index}", node)
        for name in self._terminals:  # grows
            self._add(self._source[name].line, self._terminal(name), self._source[name].body)
        first = self._source[ROOT].line
        lines = [(first, "%llguidance {}"), *self._lines]
        return Lark("\n".join(text for _, text in lines) + "\n", tuple(line for line, _ in lines))

    def _add(self, line: int, name: str, body: Node) -> None:
        """Write a rule; deep parts of it become rules of their own, as the library refuses deep ones."""
        pending = [(name, body)]
        while pending:
            name, body = pending.pop()
            self._deep = []
            self._lines.append((line, f"{name}: {self._text(body, name.isupper(), 0)}"))
            pending += self._deep

    def _rule(self, name: str) -> str:
        return "start" if name == ROOT else f"r{self._numbers[name]}{_plain(name).lower()}"

    def _terminal(self, name: str) -> str:
        return f"T{self._numbers[name]}{_plain(name).upper()}"

    def _text(self, node: Node, in_lexeme: bool, depth: int) -> str:
        if isinstance(node, Lexeme):
            found = self._plan.lexemes[node.index]
            leaf = isinstance(found, (Characters, Text))
            return self._text(found, True, depth) if leaf else f"L{node.index}"
        if isinstance(node, Text):
            return json.dumps(node.text)
        if isinstance(node, Characters):
            return "/[" + "".join(f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in node.ranges) + "]/"
        if isinstance(node, Reference):
            if not in_lexeme:
                return self._rule(node.name)
            if node.name not in self._terminals:
                self._terminals.append(node.name)
            return self._terminal(node.name)
        if depth == _MAX_PARENTHESES:
            self._num_deep += 1
            name = f"D{self._num_deep}" if in_lexeme else f"d{self._num_deep}"
            self._deep.append((name, node))
            return name
        if isinstance(node, Repeated):
            return f"({self._text(node.part, in_lexeme, depth + 1)}){_count(node)}"
        between = " " if isinstance(node, Parts) else " | "
        parts = [self._text(part, in_lexeme, depth + 1) for part in children(node)]
        return f"({between.join(parts)})" if len(parts) > 1 else (parts or ['""'])[0]


def _count(node: Repeated) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    most = "" if node.most is None else node.most
    return short.get((node.least, node.most)) or f"{{{node.least},{most}}}"


def _plain(name: str) -> str:
    return "_" + re.sub("[^A-Za-z0-9]", "_", name)
