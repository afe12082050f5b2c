"""Tools that the backends share: their library, text tokens, and what is said of a bad constraint."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from headrace_core.errors import MissingDependency, RequestError, UnsupportedFeature
from headrace_core.grammar import (
    Grammar,
    GrammarBackend,
    GrammarSpec,
    Vocabulary,
    malformed,
    refuse,
)
from headrace_engine.structured.choices import ChoiceGrammar, TokenTexts
from headrace_engine.structured.wording import plain

G = TypeVar("G", bound=Grammar)
_TRIED_TOKENS = 4
"""Tokens that are taken of a new grammar, as libraries may give up at the first ones."""
_STEP_SECONDS = 0.1
"""Most processor time for the mask of one of these; usual ones take less than a thousandth of it."""
UNKNOWN = "it cannot be compiled"
"""Said where a library's own words are not fit to be shown."""


class LibraryBackend(GrammarBackend):
    """A backend that stands on a library, imported when an object is made."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._library = self._import(self.library)

    def _import(self, module: str) -> Any:
        """A module of the library.

        Raises:
            MissingDependency: it is not installed.
        """
        try:
            return importlib.import_module(module)
        except ImportError as error:
            raise MissingDependency(
                self.library, needed_for=f"grammar backend {self.name}", install=self.install
            ) from error

    def _not_served(self, spec: GrammarSpec, message: str = "") -> UnsupportedFeature:
        """The error of a constraint that the library does not compile; another backend may."""
        return refuse(spec, [plain(message) or UNKNOWN])

    @cached_property
    def _token_texts(self) -> TokenTexts:
        return TokenTexts(self.vocabulary)

    def _choices(self, source: str) -> ChoiceGrammar:
        """A constraint of kind ``choice``, which needs no library."""
        return ChoiceGrammar(source, self._token_texts)

    def _text_tokens(self) -> Iterator[tuple[int, bytes]]:
        """(id, bytes) of the tokens that are text."""
        special = self.vocabulary.special_token_ids
        return ((i, t) for i, t in enumerate(self.vocabulary.tokens) if t and i not in special)

    def _satisfiable(self, kind: str, grammar: G) -> G:
        """A grammar that has a first token, or is complete without any.

        Raises:
            RequestError: it has neither, or the library gives up on it at once or is too slow.
        """
        matcher, words = grammar.matcher(), np.zeros((1, self.vocabulary.num_words), np.int32)
        for done in range(_TRIED_TOKENS):
            start = time.thread_time()
            matcher.fill_bitmask(words, 0)
            if matcher.failure:
                raise malformed(
                    kind, f"backend {self.name} gives up at its beginning: {matcher.failure}"
                )
            seconds = time.thread_time() - start
            if seconds > _STEP_SECONDS:
                raise malformed(
                    kind,
                    f"backend {self.name} needs {seconds:.2g} s for one token of it, in which all other "
                    f"requests wait: must be at most {_STEP_SECONDS} s; repeat less",
                )
            if not (done or words.any() or matcher.complete):
                raise malformed(kind, "no text that the tokenizer can write satisfies it")
            if not words.any():
                break
            word = int(np.flatnonzero(words[0])[0])
            bits = int(words[0, word]) & 0xFFFFFFFF
            matcher.advance([32 * word + (bits & -bits).bit_length() - 1])
        return grammar


def not_compiled(kind: str, message: str = "", where: str = "") -> RequestError:
    """The error of a constraint that a library does not take, for the reason that it gives."""
    return malformed(kind, where + (plain(message) or UNKNOWN))
