"""A matcher of grammars whose place in a text is one value: the state of an automaton or of an index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

S = TypeVar("S")
Words = npt.NDArray[np.int32]


class StateGrammar(Protocol[S]):
    """A compiled constraint over states. Its states are shared by all requests and do not change."""

    @property
    def start(self) -> S:
        """The state in which nothing is written."""
        ...

    @property
    def mask(self) -> Callable[[S], Words]:
        """The tokens that a state takes, [ceil(V / 32)] int32."""
        ...

    def after(self, state: S, token_id: int) -> S | None:
        """The state behind a token; None: the state does not take it."""
        ...

    def is_final(self, state: S) -> bool:
        """True if the text that leads to this state is complete."""
        ...


class StateMatcher(Generic[S]):
    """One request's place (:class:`headrace_core.grammar.GrammarMatcher`): the states behind its tokens."""

    def __init__(self, grammar: StateGrammar[S]) -> None:
        self._grammar = grammar
        self._states = [grammar.start]

    def fill_bitmask(self, bitmask: Words, row: int) -> None:
        bitmask[row] = self._grammar.mask(self._states[-1])

    def advance(self, token_ids: Sequence[int]) -> bool:
        states = self._states[-1:]
        for token_id in token_ids:
            state = self._grammar.after(states[-1], token_id)
            if state is None:
                return False
            states.append(state)
        self._states += states[1:]
        return True

    def roll_back(self, num_tokens: int) -> None:
        if num_tokens:
            del self._states[-num_tokens:]

    @property
    def complete(self) -> bool:
        return self._grammar.is_final(self._states[-1])

    @property
    def terminated(self) -> bool:
        return self.complete and not self._grammar.mask(self._states[-1]).any()

    @property
    def failure(self) -> str:
        return ""
