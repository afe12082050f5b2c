"""A grammar backend whose matchers are slow when told, and wait for the test in their threads."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import numpy as np

from headrace_core.grammar import Constraint, GrammarBackend, GrammarSpec, Vocabulary
from headrace_engine.structured.store import Compiled

PATIENCE = 60
"""Seconds; only ever waited in full by a test that fails."""


class HeldMatcher:
    """Allows the tokens (n + 1) % V, (n + 2) % V, ... after n tokens, :attr:`HeldBackend.width` of them;
    never complete."""

    failure = ""
    complete = terminated = False

    def __init__(self, backend: HeldBackend) -> None:
        self.backend = backend
        self.taken: list[int] = []

    def fill_bitmask(self, bitmask, row):
        self.backend.pass_gate(self)
        bitmask[row] = 0
        for token in self.allowed:
            bitmask[row, token // 32] |= np.uint32(1 << (token % 32)).view(np.int32)

    @property
    def allowed(self):
        size, first = self.backend.vocabulary.size, len(self.taken) + 1
        return [(first + i) % size for i in range(self.backend.width)]

    def advance(self, token_ids):
        for token_id in token_ids:
            assert token_id in self.allowed, "another token than the mask allows"
            self.taken.append(token_id)
        return True

    def roll_back(self, num_tokens):
        del self.taken[len(self.taken) - num_tokens :]


class HeldBackend(GrammarBackend):
    """Its own grammar. In a thread that is not the test's a mask waits to be let go on.

    ``seconds``: what the next pieces of matching are said to take, by the budget's clock.
    """

    name = "held"
    releases_gil = frozenset({"regex"})

    def __init__(self, size=37, width=1):
        super().__init__(Vocabulary([bytes([i]) for i in range(size)]))
        self.width = width
        self.home = threading.get_ident()
        self._permits = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.seconds = 0.0
        self.raises = None
        self.now = 0.0

    @classmethod
    def refuse(cls, spec):
        return []

    def compile(self, spec):
        return self

    def matcher(self):
        return HeldMatcher(self)

    def let_one(self):
        """One mask in a thread goes on."""
        self._permits.release()

    def open(self):
        """All of them do, from now on."""
        self._permits.release(1000)

    def clock(self):
        return self.now

    def pass_gate(self, matcher):
        if threading.get_ident() != self.home:
            self.entered.release()
            assert self._permits.acquire(timeout=PATIENCE)
        if self.raises is not None:
            raise self.raises
        self.now += self.seconds


class HeldStore:
    """As much of a grammar store as the maker of constraints needs."""

    matching_seconds = 0.25

    def __init__(self, backend):
        self.backend = backend
        self.vocabulary = backend.vocabulary

    def request(self, constraint):
        compiled = Future()
        compiled.set_result(Compiled(self.backend, self.backend))
        return compiled


CONSTRAINT = Constraint(GrammarSpec("held", "regex", "x"), ())
