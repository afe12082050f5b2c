"""Finds the parts of a grammar that can be lexemes, and where they must be cut.

llguidance reads a text lexeme by lexeme, each as long as it can be. A part of a grammar without recursion
can be one lexeme, which is fast; but where a text could also end that lexeme earlier and go on with another,
the library would refuse it. Such parts are cut smaller, at last into single characters, which have but one
length. A grammar without any recursion is one lexeme as a whole.

What cannot be cut well is left as it is: every text that is written is of the grammar then, but not every
text of the grammar can be written.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from headrace_engine.structured.grammars.gbnf import (
    ROOT,
    Characters,
    Either,
    Lexeme,
    Node,
    Parts,
    Reference,
    Repeated,
    Rule,
    Text,
    children,
    references,
)

MAX_WORK = 200_000
"""Steps, some 2 us each, in search of parts that must be cut; beyond them nothing is."""


def lexeme_plan(rules: Mapping[str, Rule], *, cut: bool = True) -> LexemePlan:
    """The rules of a grammar with lexemes for leaves.

    Args:
        rules: all that are referred to, and :data:`ROOT`.
        cut: cut lexemes where they would be too long.
    """
    cuts = _Cuts(rules)
    try:
        while cut and (found := _ambiguous(cuts)):
            cuts.cut |= found
    except (_TooMuchWork, RecursionError):
        cuts.cut.clear()
    return cuts.plan()


class _TooMuchWork(Exception):
    """The search for lexemes would take long."""


@dataclass(slots=True)
class LexemePlan:
    """Rules whose leaves are lexemes."""

    rules: dict[str, Node] = field(default_factory=dict)
    """Root first."""
    lexemes: list[Node] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    """Places of the lexemes in the source."""


class _Cuts:
    """A grammar, and which of its regular parts are cut."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self.regular = _regular(rules)
        self.rules = {
            name: rule if name in self.regular else Rule(self._grouped(rule.body), rule.line)
            for name, rule in rules.items()
        }
        self.cut: set[int] = set()
        """Identities of nodes."""
        self.work = 0
        self._singles: dict[str, Text] = {}
        """Characters of texts that are cut: kept, as automata are found by identity."""
        self._automata: dict[int, _Automaton] = {}
        self._alphabet = _Alphabet(rules)

    def spend(self, steps: int) -> None:
        self.work += steps
        if self.work > MAX_WORK:
            raise _TooMuchWork

    def automaton(self, node: Node) -> _Automaton:
        if id(node) not in self._automata:
            self._automata[id(node)] = _Automaton(node, self.rules, self._alphabet, self.spend)
        return self._automata[id(node)]

    def plan(self) -> LexemePlan:
        plan, pending = LexemePlan(), [ROOT]
        known: dict[object, int] = {}
        while pending:
            name = pending.pop()
            if name not in plan.rules:
                rule = self.rules[name]
                found: list[str] = []
                plan.rules[name] = self._place(rule.body, rule.line, plan, known, found)
                pending += found
        return plan

    def _place(
        self, node: Node, line: int, plan: LexemePlan, known: dict[object, int], found: list[str]
    ) -> Node:
        if isinstance(node, Reference):
            if node.name in self.regular and not self._is_cut(self.rules[node.name].body):
                return self._lexeme(
                    self.rules[node.name].body, self.rules[node.name].line, plan, known
                )
            found.append(node.name)
            return node
        if isinstance(node, Text) and len(node.text) > 1 and self._is_cut(node):
            singles = [self._singles.setdefault(c, Text(c)) for c in node.text]
            return Parts(tuple(self._lexeme(one, line, plan, known) for one in singles))
        if isinstance(node, (Characters, Text)) or not (
            self._is_cut(node) or not self._is_regular(node)
        ):
            return self._lexeme(node, line, plan, known)
        inner = tuple(self._place(part, line, plan, known, found) for part in children(node))
        if isinstance(node, Repeated):
            return Repeated(inner[0], node.least, node.most)
        return Either(inner) if isinstance(node, Either) else Parts(inner)

    def _lexeme(self, node: Node, line: int, plan: LexemePlan, known: dict[object, int]) -> Node:
        key: object = id(node)
        if isinstance(node, Text):
            if not node.text:
                return Parts(())
            key = node.text
        elif isinstance(node, Characters):
            key = node.ranges
        elif isinstance(node, Parts) and not node.parts:
            return node
        if key not in known:
            known[key] = len(plan.lexemes)
            plan.lexemes.append(node)
            plan.lines.append(line)
        return Lexeme(known[key])

    def _is_cut(self, node: Node) -> bool:
        return id(node) in self.cut

    def _is_regular(self, node: Node) -> bool:
        return all(name in self.regular for name in references(node))

    def _grouped(self, node: Node) -> Node:
        """The node with regular parts that follow each other in one group."""
        if isinstance(node, Repeated):
            return Repeated(self._grouped(node.part), node.least, node.most)
        if isinstance(node, Either):
            return Either(tuple(map(self._grouped, node.parts)))
        if not isinstance(node, Parts) or self._is_regular(node):
            return node
        grouped: list[Node] = []
        run: list[Node] = []
        for part in (*node.parts, None):
            if part is not None and self._is_regular(part):
                run.append(part)
                continue
            grouped += [Parts(tuple(run))] if len(run) > 1 else run
            run = []
            if part is not None:
                grouped.append(self._grouped(part))
        return Parts(tuple(grouped))


def _regular(rules: Mapping[str, Rule]) -> set[str]:
    """Rules that do not lead back to any rule."""
    needs = {name: set(references(rule.body)) for name, rule in rules.items()}
    used_by: dict[str, list[str]] = {name: [] for name in rules}
    for name, used in needs.items():
        for other in used:
            used_by[other].append(name)
    free = [name for name, used in needs.items() if not used]
    for name in free:  # grows
        for user in used_by[name]:
            needs[user].discard(name)
            if not needs[user]:
                free.append(user)
    return set(free)


def _ambiguous(cuts: _Cuts) -> set[int]:
    """Lexemes with which the reader would go on where another parse has ended its lexeme."""
    plan = cuts.plan()
    follows = _Follows(plan, cuts)
    automata = [cuts.automaton(node) for node in plan.lexemes]
    first = [automaton.first_letters for automaton in automata]
    after = [_union(first[i] for i in _bits(mask) if i < len(first)) for mask in follows.lexemes]
    long = [i for i, automaton in enumerate(automata) if automaton.long]
    overlaps: dict[tuple[int, int], tuple[bool, int]] = {}

    def overlap(one: int, other: int) -> tuple[bool, int]:
        if (one, other) not in overlaps:
            overlaps[one, other] = automata[one].overlap(automata[other], cuts.spend)
        return overlaps[one, other]

    together = _together(follows, len(automata), lambda a, b: overlap(a, b)[0], cuts)
    return {
        id(plan.lexemes[longer])
        for longer in long
        for shorter in _bits(together[longer])
        if after[shorter] & overlap(shorter, longer)[1]
    }


def _together(
    follows: _Follows, count: int, meet: Callable[[int, int], bool], cuts: _Cuts
) -> list[int]:
    """For each lexeme, those that may be possible at a place where it is, as bits."""
    together = [0] * count
    done: set[tuple[int, int]] = set()
    pending = [follows.start, *follows.lexemes]
    everything = (1 << count) - 1
    while pending:
        group = pending.pop() & everything
        for one in _bits(group):
            new = group & ~together[one]
            cuts.spend(1)
            together[one] |= group
            for other in _bits(new):
                pair = (min(one, other), max(one, other))
                if one != other and pair not in done:
                    done.add(pair)
                    if meet(*pair):
                        pending.append(follows.lexemes[one] | follows.lexemes[other])
    return together


class _Follows:
    """Lexemes that may come first, and behind each lexeme, as bits."""

    def __init__(self, plan: LexemePlan, cuts: _Cuts) -> None:
        self._plan = plan
        self._spend = cuts.spend
        self._nullable = [cuts.automaton(node).nullable for node in plan.lexemes]
        self._first: dict[str, tuple[bool, int]] = dict.fromkeys(plan.rules, (False, 0))
        self._known: dict[int, tuple[bool, int]] | None = None
        while self._grows():
            pass
        self._known = {}
        self.lexemes = [0] * len(plan.lexemes)
        self._rules = dict.fromkeys(plan.rules, 0)
        self.start = self._first[ROOT][1]
        changed = True
        while changed:
            changed = False
            for name, body in plan.rules.items():
                changed |= self._spread(body, self._rules[name])

    def _grows(self) -> bool:
        before = dict(self._first)
        for name, body in self._plan.rules.items():
            self._first[name] = self._of(body)
        return self._first != before

    def _of(self, place: Node) -> tuple[bool, int]:
        """(whether it may be nothing, lexemes that it may begin with)."""
        if self._known is not None and id(place) in self._known:
            return self._known[id(place)]
        self._spend(1)
        found = self._compute(place)
        if self._known is not None:
            self._known[id(place)] = found
        return found

    def _compute(self, place: Node) -> tuple[bool, int]:
        if isinstance(place, Lexeme):
            return self._nullable[place.index], 1 << place.index
        if isinstance(place, Reference):
            return self._first[place.name]
        if isinstance(place, Repeated):
            nullable, first = self._of(place.part)
            return nullable or place.least == 0, first
        inner = [self._of(part) for part in children(place)]
        if isinstance(place, Either):
            return any(nullable for nullable, _ in inner), _union(first for _, first in inner)
        found = 0
        for nullable, first in inner:
            found |= first
            if not nullable:
                return False, found
        return True, found

    def _spread(self, place: Node, after: int) -> bool:
        """Let what may follow a place follow its last parts, too; returns True if that is news."""
        self._spend(1)
        if isinstance(place, Lexeme):
            known = self.lexemes[place.index]
            self.lexemes[place.index] |= after
            return known != self.lexemes[place.index]
        if isinstance(place, Reference):
            known = self._rules[place.name]
            self._rules[place.name] |= after
            return known != self._rules[place.name]
        if isinstance(place, Repeated):
            again = self._of(place.part)[1] if place.most != 1 else 0
            return self._spread(place.part, after | again)
        changed = False
        for part in reversed(children(place)):
            changed |= self._spread(part, after)
            if isinstance(place, Parts):
                nullable, first = self._of(part)
                after = first | (after if nullable else 0)
        return changed


class _Alphabet:
    """Characters that no part of a grammar tells apart are one letter; sets of letters are bits."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        edges: set[int] = set()
        pending = [rule.body for rule in rules.values()]
        while pending:
            node = pending.pop()
            pending += children(node)
            for first, last in _ranges(node):
                edges |= {first, last + 1}
        self._edges = sorted(edges)

    def letters(self, first: int, last: int) -> int:
        low, high = bisect_left(self._edges, first), bisect_left(self._edges, last + 1)
        return (1 << high) - (1 << low)


def _ranges(node: Node) -> Iterator[tuple[int, int]]:
    if isinstance(node, Characters):
        yield from node.ranges
    elif isinstance(node, Text):
        yield from ((ord(c), ord(c)) for c in node.text)


class _Automaton:
    """A regular part as the automaton of its characters' places (Glushkov, 1961).

    It may accept more than the part: counts are taken for any number, and a rule that is used twice has its
    places once. So it finds ambiguities where there are none, and never overlooks one.
    """

    def __init__(
        self,
        node: Node,
        rules: Mapping[str, Rule],
        alphabet: _Alphabet,
        spend: Callable[[int], None],
    ) -> None:
        self._rules, self._alphabet, self._spend = rules, alphabet, spend
        self._letters: list[int] = []
        self._follow: list[int] = []
        self._seen: dict[str, tuple[bool, int, int]] = {}
        self.nullable, self._first, self._last = self._build(node)
        self.first_letters = _union(self._letters[i] for i in _bits(self._first))
        self.long = any(self._follow[i] for i in range(len(self._follow)))
        """True if a text of it may have more than one character."""

    def overlap(self, longer: _Automaton, spend: Callable[[int], None]) -> tuple[bool, int]:
        """(whether some text is of both, letters with which ``longer`` goes on behind a text of this)."""
        both, letters = False, 0
        seen: set[tuple[int, int]] = set()
        pending = [(self._first, longer._first)]
        while pending:
            ones, others = pending.pop()
            for one in _bits(ones):
                for other in _bits(others):
                    spend(1)
                    if (one, other) in seen or not self._letters[one] & longer._letters[other]:
                        continue
                    seen.add((one, other))
                    if self._last >> one & 1:
                        both = both or bool(longer._last >> other & 1)
                        letters |= _union(longer._letters[i] for i in _bits(longer._follow[other]))
                    pending.append((self._follow[one], longer._follow[other]))
        return both, letters

    def _leaf(self, letters: int) -> int:
        self._spend(1)
        self._letters.append(letters)
        self._follow.append(0)
        return 1 << (len(self._letters) - 1)

    def _join(self, last: int, first: int) -> None:
        for one in _bits(last):
            self._spend(1)
            self._follow[one] |= first

    def _build(self, node: Node) -> tuple[bool, int, int]:
        """(may be nothing, first places, last places)."""
        if isinstance(node, Characters):
            leaf = self._leaf(_union(self._alphabet.letters(*one) for one in node.ranges))
            return False, leaf, leaf
        if isinstance(node, Text):
            leaves = [self._leaf(self._alphabet.letters(ord(c), ord(c))) for c in node.text]
            return self._sequence([(False, leaf, leaf) for leaf in leaves])
        if isinstance(node, Reference):
            if node.name not in self._seen:
                self._seen[node.name] = self._build(self._rules[node.name].body)
            return self._seen[node.name]
        if isinstance(node, Parts):
            return self._sequence([self._build(part) for part in node.parts])
        if isinstance(node, Either):
            parts = [self._build(part) for part in node.parts]
            return (
                any(p[0] for p in parts),
                _union(p[1] for p in parts),
                _union(p[2] for p in parts),
            )
        assert isinstance(node, Repeated), "no grammar is read with lexemes in it"
        nullable, first, last = self._build(node.part)
        if node.most != 1:
            self._join(last, first)
        return nullable or node.least == 0, first, last

    def _sequence(self, parts: list[tuple[bool, int, int]]) -> tuple[bool, int, int]:
        nullable, first, last = True, 0, 0
        for empty, begins, ends in parts:
            self._join(last, begins)
            first |= begins if nullable else 0
            last = ends | (last if empty else 0)
            nullable = nullable and empty
        return nullable, first, last


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _union(masks: Iterable[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found
