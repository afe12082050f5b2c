"""Tells whether a grammar in Lark never ends. llguidance alone checks the grammar's syntax: where this reader
meets something that it does not know, it finds nothing.

Source of the syntax: llguidance's docs/syntax.md.
"""

from __future__ import annotations

import re

from headrace_core.grammar import malformed
from headrace_engine.structured.grammars.gbnf import (
    Either,
    Node,
    Parts,
    Reference,
    Repeated,
    Rule,
    Text,
    endless,
    references,
)

_MAX_DEPTH = 50
"""Groups in each other."""
_START = "start"
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|//[^\n]*|\#[^\n]*)
    |(?P<head>(?<![^\n])[?!]?(?P<rule>[A-Za-z_]\w*)[ \t]*:)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<leaf>"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[imslux]*|<[^<>\n]+>)
    |(?P<count>[?*+]|\{[ \t]*(?P<least>\d{0,7})[ \t]*(?:,[ \t]*\d{0,7}[ \t]*)?\})
    |(?P<mark>[()\[\]|])""",
    re.VERBOSE,
)
_LEAF = Text("a")
"""Stands for all that is not a rule."""

Alternatives = list[list[Node]]


def check_end(source: str) -> None:
    """Refuse a grammar whose rule ``start`` never ends.

    Args:
        source: a grammar in Lark.

    Raises:
        RequestError: each alternative of ``start`` needs it again; names the line.
    """
    rules = _rules(source)
    rule = dict(endless(rules)).get(_START) if rules else None
    if rule is not None:
        raise malformed(
            "grammar",
            f"line {rule.line}: the rule {_START!r} never ends, as each of its alternatives leads to "
            "a rule that needs itself again: must have one that does not",
        )


def _rules(source: str) -> dict[str, Rule]:
    """The rules by name; {}: there is something that this reader does not know."""
    bodies: dict[str, tuple[int, Alternatives]] = {}
    stack: list[tuple[str, Alternatives]] = []
    at = 0
    while at < len(source):
        found = _TOKEN.match(source, at)
        if found is None or not (bodies or found["head"] or found["space"]):
            return {}
        at = found.end()
        if found["head"]:
            if len(stack) > 1 or found["rule"] in bodies:
                return {}
            stack = [("", [[]])]
            bodies[found["rule"]] = source.count("\n", 0, found.start()) + 1, stack[0][1]
        elif not found["space"] and not _taken(found, stack):
            return {}
    if len(stack) != 1:
        return {}
    rules = {name: Rule(_either(body), line) for name, (line, body) in bodies.items()}
    named = {name for rule in rules.values() for name in references(rule.body)}
    return rules if named <= rules.keys() else {}


def _taken(found: re.Match[str], stack: list[tuple[str, Alternatives]]) -> bool:
    """Take a token of a rule's right side; False: it does not fit."""
    parts = stack[-1][1][-1]
    if found["name"]:
        parts.append(Reference(found["name"]))
    elif found["leaf"]:
        parts.append(_LEAF)
    elif found["count"]:
        if not parts:
            return False
        least = found["least"]
        free = found["count"] in "?*" if least is None else not int(least or 0)
        parts[-1] = Repeated(parts[-1], 0 if free else 1, None)
    elif found["mark"] == "|":
        stack[-1][1].append([])
    elif found["mark"] in "([":
        stack.append((found["mark"], [[]]))
        return len(stack) <= _MAX_DEPTH
    else:
        opened, body = stack[-1]
        if {"(": ")", "[": "]"}.get(opened) != found["mark"]:
            return False
        stack.pop()
        group = _either(body)
        stack[-1][1][-1].append(Repeated(group, 0, 1) if opened == "[" else group)
    return True


def _either(body: Alternatives) -> Node:
    return Either(tuple(Parts(tuple(parts)) for parts in body))
