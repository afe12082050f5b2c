"""Turns recursion that only begins or ends a rule into a loop.

Loops of single characters cost llguidance much. So rules whose recursion is a loop (``list ::= item | item
"," list``) are written as loops before a grammar is cut into lexemes.
"""

from __future__ import annotations

from headrace_engine.structured.grammars.gbnf import (
    Either,
    Node,
    Parts,
    Reference,
    Repeated,
    Rule,
    references,
)


def with_loops(name: str, rule: Rule) -> Rule:
    """A rule that only begins, or only ends, with itself as a loop (Arden, 1961)."""
    if name not in references(rule.body):
        return rule
    for last in (True, False):
        try:
            again, stop = _steps(rule.body, name, last)
        except _NoLoop:
            continue
        if again is not None and stop is not None:
            loop = Repeated(again, 0, None)
            return Rule(Parts((loop, stop) if last else (stop, loop)), rule.line)
    return rule


class _NoLoop(Exception):
    """A rule's recursion is in the middle, or within a repetition."""


def _steps(node: Node, name: str, last: bool) -> tuple[Node | None, Node | None]:
    """(what a round of the loop is, what ends the loop); None: nothing does.

    Args:
        node: of the rule ``name``.
        last: the rule ends with itself; False: it begins with itself.
    """
    if isinstance(node, Reference) and node.name == name:
        return Parts(()), None
    if name not in references(node):
        return None, node
    if isinstance(node, Repeated) and (node.least, node.most) == (0, 1):
        node = Either((node.part, Parts(())))
    if isinstance(node, Either):
        found = [_steps(part, name, last) for part in node.parts]
        rounds = tuple(again for again, _ in found if again is not None)
        stops = tuple(stop for _, stop in found if stop is not None)
        return Either(rounds) if rounds else None, Either(stops) if stops else None
    if not isinstance(node, Parts):
        raise _NoLoop
    edge, others = (node.parts[-1], node.parts[:-1]) if last else (node.parts[0], node.parts[1:])
    if any(name in references(part) for part in others):
        raise _NoLoop
    again, stop = (
        one and Parts((*others, one) if last else (one, *others))
        for one in _steps(edge, name, last)
    )
    return again, stop
