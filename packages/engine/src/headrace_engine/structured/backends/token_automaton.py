"""Tokens run through a regex's automaton, all of them at once: which may be next in a state.

A walk over the characters of 128,000 tokens in Python takes up to seconds. Here they are a table of
characters, and a step through one column takes all tokens that are still alive to their next states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
SHORT = 12
"""Characters of the tokens in the first table; few are longer, and they would make it wide."""


class TokenCharacters:
    """The characters of a vocabulary's tokens.

    Args:
        texts: token id -> text, not empty.
    """

    def __init__(self, texts: Mapping[int, str]) -> None:
        self.characters = sorted(set("".join(texts.values())))
        """All that occur; tables hold indices of them, -1 behind a token's end."""
        number_of = {character: number for number, character in enumerate(self.characters)}
        self.tables = [
            _table(
                {i: text for i, text in texts.items() if (len(text) > SHORT) == is_long}, number_of
            )
            for is_long in (False, True)
        ]


def _table(texts: Mapping[int, str], number_of: Mapping[str, int]) -> tuple[Ints, Ints, Ints]:
    """(token ids [n], lengths [n], indices of characters [longest, n])."""
    ids = np.fromiter(texts, np.int64, len(texts))
    lengths = np.fromiter(map(len, texts.values()), np.int64, len(texts))
    columns = np.full((int(lengths.max(initial=0)), len(texts)), -1, np.int64)
    for row, text in enumerate(texts.values()):
        columns[: len(text), row] = [number_of[character] for character in text]
    return ids, lengths, columns


class TokenAutomaton:
    """One regex's automaton over tokens.

    Args:
        fsm: an ``interegular.FSM``.
        others: its symbol for characters that it does not name.
        tokens: the vocabulary's.
    """

    def __init__(self, fsm: Any, others: object, tokens: TokenCharacters) -> None:
        self._tokens = tokens
        states = sorted({*fsm.map, *fsm.finals, fsm.initial, *_targets(fsm.map)})
        self._row_of = {state: row for row, state in enumerate(states)}
        self._dead = len(states)
        symbol_of, default = _symbols(fsm.alphabet.by_transition, others)
        used = sorted({*symbol_of.values(), *(() if default is None else (default,))})
        column_of = {symbol: column for column, symbol in enumerate(used)}
        self._next = np.full((len(states) + 1, len(used) + 1), self._dead, np.int64)
        """[state, symbol] -> state; the last symbol is of characters that may never occur."""
        for state, transitions in fsm.map.items():
            for symbol, target in transitions.items():
                if symbol in column_of:
                    self._next[self._row_of[state], column_of[symbol]] = self._row_of[target]
        symbols = (symbol_of.get(character, default) for character in tokens.characters)
        self._symbols = np.array(
            [len(used) if symbol is None else column_of[symbol] for symbol in symbols], np.int64
        )
        self._finals = {self._row_of[state] for state in fsm.finals}
        self.start = self._row_of[fsm.initial]
        self._symbol_of = symbol_of
        self._default = default
        self._column_of = column_of

    def is_final(self, state: int) -> bool:
        """True if a text that leads to this state matches."""
        return state in self._finals

    def after(self, state: int, text: str) -> int | None:
        """The state behind a text; None: it cannot be written."""
        for character in text:
            symbol = self._symbol_of.get(character, self._default)
            column = -1 if symbol is None else self._column_of[symbol]
            state = int(self._next[state, column])
            if state == self._dead:
                return None
        return state

    def allowed(self, state: int) -> Ints:
        """Ids of the tokens that may be next, in no order."""
        found = []
        for ids, lengths, columns in self._tokens.tables:
            alive = np.arange(len(ids))
            states = np.full(len(ids), state, np.int64)
            for position, characters in enumerate(columns):
                states = self._next[states, self._symbols[characters[alive]]]
                kept = states != self._dead
                alive, states = alive[kept], states[kept]
                going_on = lengths[alive] > position + 1
                found.append(ids[alive[~going_on]])
                alive, states = alive[going_on], states[going_on]
                if not len(alive):
                    break
        return np.concatenate(found) if found else np.zeros(0, np.int64)


def _targets(transitions: Mapping[int, Mapping[int, int]]) -> set[int]:
    return {target for row in transitions.values() for target in row.values()}


def _symbols(
    by_transition: Mapping[int, Sequence[Any]], others: object
) -> tuple[dict[str, int], int | None]:
    """Character -> symbol, and the symbol of all other characters, if they may occur."""
    symbol_of: dict[str, int] = {}
    default: int | None = None
    for symbol, characters in by_transition.items():
        for character in characters:
            if character is others:
                default = symbol
            else:
                symbol_of[character] = symbol
    return symbol_of, default
