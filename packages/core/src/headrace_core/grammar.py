"""Structured output: a constraint compiled once, matched per request, masking logits per step.

The parts, in the order in which a request meets them:

- :class:`~headrace_core.sampling.params.StructuredOutputsParams`: what a caller asks for.
- :class:`GrammarSpec`: the same as plain data, for one backend; equal specs share a grammar.
- :class:`GrammarBackend`: says what it cannot do, and compiles a spec for a :class:`Vocabulary`.
- :class:`Grammar`: compiled; immutable and shared between requests.
- :class:`GrammarMatcher`: one request's place in a grammar.

Importing this module imports neither torch nor numpy. Bitmasks are numpy arrays of int32 words
[B, ceil(V / 32)]: bit ``v % 32`` of word ``v // 32`` stands for token ``v``.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from headrace_core.errors import RequestError, UnsupportedFeature

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Words = npt.NDArray[np.int32]

BACKENDS = ("guidance", "xgrammar", "outlines", "lm-format-enforcer")
"""The backends that come with headrace, in the order in which ``auto`` tries them."""
BACKEND_ALIASES = {"llguidance": "guidance", "outlines-core": "outlines"}


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint as plain data, for one backend. Equal specs are the same grammar."""

    backend: str
    """Name under ``headrace.grammar_backends``."""
    kind: str
    """One of :data:`headrace_core.sampling.params.CONSTRAINTS`."""
    source: str
    """Regex or grammar as given; JSON text for ``json``, ``choice`` and ``structural_tag``; ""
    for ``json_object``."""
    whitespace_pattern: str | None = None
    """Regex of the white space between JSON tokens."""
    any_whitespace: bool = True
    """True if JSON may hold white space between its tokens."""

    @property
    def key(self) -> bytes:
        """Digest of the content."""
        return hashlib.blake2b(repr(astuple(self)).encode(), digest_size=32).digest()


@dataclass(frozen=True, slots=True)
class Constraint:
    """One request's constraint, on its way to the worker. Crosses the process border as msgpack."""

    grammar: GrammarSpec
    end_token_ids: tuple[int, ...]
    """Tokens that end the output; possible only where it is complete."""
    start_after: str = ""
    """The constraint holds from the first occurrence of this text in the output on; "": from the
    first token on."""
    may_begin_with: str = ""
    """The output may begin with this text, and is free from there to the end of ``start_after``; if
    it does not, the constraint holds from the first token on. "": it is free in any case."""
    size_bytes: int = 0
    """About what the compiled grammar takes; 0 = not known."""


class Refusal(str):
    """Why a backend cannot serve a constraint: a sentence that begins with keyword and pointer."""

    __slots__ = ()

    @classmethod
    def of(cls, keyword: str, pointer: str, reason: str) -> Refusal:
        """A refusal of ``keyword`` of the JSON schema at the JSON pointer ``pointer``, which is
        shown as a URI fragment: ``#`` is the whole schema."""
        return cls(f"{keyword!r} at {'#' + pointer!r}: {reason}")


def refuse(spec: GrammarSpec, reasons: Sequence[str]) -> UnsupportedFeature:
    """The error of a constraint that a backend cannot serve."""
    shown = "; ".join(reasons[:5]) + (f"; and {len(reasons) - 5} more" if len(reasons) > 5 else "")
    return UnsupportedFeature(
        f"structured_outputs.{spec.kind}: backend {spec.backend} cannot serve it: {shown}",
        param=f"structured_outputs.{spec.kind}",
    )


def malformed(kind: str, reason: str) -> RequestError:
    """The error of a constraint that is wrong whatever the backend."""
    return RequestError(f"structured_outputs.{kind}: {reason}", param=f"structured_outputs.{kind}")


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of a model's tokens.

    Args:
        tokens: by id; b"" for ids that stand for no text.
        special_token_ids: tokens that are marks, not text; their bytes are their names. Free text
            never holds them.
        encode: the tokenizer's spelling of a text, special tokens not added; None: any spelling
            will do.
    """

    tokens: Sequence[bytes]
    special_token_ids: frozenset[int] = frozenset()
    encode: Callable[[str], list[int]] | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        """Number of ids, V."""
        return len(self.tokens)

    @property
    def num_words(self) -> int:
        """Words of a bitmask's row, ceil(V / 32)."""
        return -(-len(self.tokens) // 32)

    @cached_property
    def text_ids(self) -> dict[bytes, int]:
        """Bytes -> the lowest id of a token that is text and spells them."""
        found: dict[bytes, int] = {}
        for token_id, token in enumerate(self.tokens):
            if token and token_id not in self.special_token_ids:
                found.setdefault(token, token_id)
        return found

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Name -> id of the special tokens."""
        return {
            self.tokens[i].decode("utf-8", "replace"): i
            for i in sorted(self.special_token_ids, reverse=True)
            if i < len(self.tokens) and self.tokens[i]
        }

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token that is text."""
        return max(map(len, self.text_ids), default=0)


@runtime_checkable
class GrammarMatcher(Protocol):
    """One request's place in a grammar. Used from one thread at a time."""

    def fill_bitmask(self, bitmask: Words, row: int) -> None:
        """Set row ``row`` of bitmask [B, ceil(V / 32)] int32: bit v = token v may be next.

        End tokens are no part of a grammar and never set: :attr:`complete` says whether the output
        may end. A backend may allow one spelling of text that is forced anyway, and forbid others.
        """

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Take tokens; False, with nothing taken, if the grammar forbids one."""

    def roll_back(self, num_tokens: int) -> None:
        """Forget the last tokens taken."""

    @property
    def complete(self) -> bool:
        """The tokens taken so far are a sentence: the output may end."""

    @property
    def terminated(self) -> bool:
        """The output is complete, and nothing but an end token may follow."""

    @property
    def failure(self) -> str:
        """Why the library gave up matching, fit to be shown to a client; "": it has not. One that
        gave up allows no token."""


class Grammar(Protocol):
    """A compiled constraint; immutable and shared between requests."""

    def matcher(self) -> GrammarMatcher:
        """A new place, at the beginning. Thread-safe."""


class GrammarBackend(ABC):
    """The class behind an entry point of ``headrace.grammar_backends``.

    The class itself answers what it can serve; an object compiles for one vocabulary. Making one
    may take seconds; it is made when the first constraint needs it.

    Raises (on construction):
        MissingDependency: its library is not installed; carries the install line.
    """

    name: ClassVar[str]
    """As users type it."""
    library: ClassVar[str] = ""
    """Import name of the library that it needs; "" = none."""
    install: ClassVar[str] = ""
    """The command that provides it."""
    releases_gil: ClassVar[frozenset[str]] = frozenset()
    """Kinds of constraints (:data:`headrace_core.sampling.params.CONSTRAINTS`) whose matchers let other
    threads run Python while they work. Slow ones are matched beside the steps."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @classmethod
    @abstractmethod
    def refuse(cls, spec: GrammarSpec) -> list[str]:
        """Reasons why this backend cannot serve a constraint, [] if nothing is known against it.

        Quick (linear in the source) and without the library. Each reason names keyword and JSON
        pointer where there are such (:class:`Refusal`).
        """

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> Grammar:
        """Compile a constraint that :meth:`refuse` has nothing against. Thread-safe.

        May take long and much memory: it runs first in a process that is killed then.

        Raises:
            RequestError: it is malformed, or admits no text; names what and where.
        """

    def is_worn(self, grammar: Grammar) -> bool:
        """True if a grammar of this backend must be compiled anew before another request can use it: its
        matchers share something that one of them has used up."""
        return False

    def fill_bitmasks(self, rows: Sequence[tuple[GrammarMatcher, int]], bitmask: Words) -> None:
        """Fill several rows of one bitmask, in parallel if the backend can.

        Args:
            rows: (matcher, row), all of this backend.
            bitmask: [B, ceil(V / 32)].
        """
        for matcher, row in rows:
            matcher.fill_bitmask(bitmask, row)
