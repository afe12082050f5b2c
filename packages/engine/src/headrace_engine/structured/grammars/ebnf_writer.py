"""Writes a grammar as the EBNF that xgrammar reads.

Source: xgrammar's page on its EBNF, https://xgrammar.mlc.ai/docs/ (GBNF with fewer escapes).
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace_engine.structured.grammars.gbnf import (
    ROOT,
    Characters,
    Node,
    Parts,
    Reference,
    Repeated,
    Rule,
    Text,
    children,
)

_MAX_PARENTHESES = 16


def to_ebnf(rules: Mapping[str, Rule]) -> str:
    """A grammar in GBNF as EBNF with the rule ``root``.

    Args:
        rules: all that are referred to, and :data:`~headrace_engine.structured.grammars.gbnf.ROOT`.
    """
    return _Writer(rules).ebnf()


class _Writer:
    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self._rules = rules
        self._names = {name: f"r{number}" for number, name in enumerate(rules)} | {ROOT: ROOT}
        self._deep: list[tuple[str, Node]] = []
        """Parts that are written as rules of their own, as deep ones are slow to read."""
        self._num_deep = 0

    def ebnf(self) -> str:
        pending = [(self._names[name], rule.body) for name, rule in self._rules.items()]
        lines = []
        while pending:
            name, body = pending.pop(0)
            self._deep = []
            lines.append(f"{name} ::= {self._text(body, 0)}\n")
            pending += self._deep
        return "".join(lines)

    def _text(self, node: Node, depth: int) -> str:
        if isinstance(node, Text):
            return '"' + "".join(_escaped(ord(character)) for character in node.text) + '"'
        if isinstance(node, Characters):
            return "[" + "".join(f"{_escaped(a)}-{_escaped(b)}" for a, b in node.ranges) + "]"
        if isinstance(node, Reference):
            return self._names[node.name]
        if depth == _MAX_PARENTHESES:
            self._num_deep += 1
            self._deep.append((f"d{self._num_deep}", node))
            return f"d{self._num_deep}"
        if isinstance(node, Repeated):
            most = "" if node.most is None else node.most
            return f"({self._text(node.part, depth + 1)}){{{node.least},{most}}}"
        between = " " if isinstance(node, Parts) else " | "
        parts = [self._text(part, depth + 1) for part in children(node)]
        return f"({between.join(parts)})" if len(parts) > 1 else (parts or ['""'])[0]


def _escaped(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
