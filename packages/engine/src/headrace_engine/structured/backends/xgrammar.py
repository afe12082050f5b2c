"""xgrammar: JSON schemas, regexes, EBNF and structural tags. Imports torch.

Source: https://github.com/mlc-ai/xgrammar. Its converter passes over keywords that it does not
know; :data:`KEYWORDS` holds those that it was seen to enforce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from headrace_core.grammar import GrammarSpec, Refusal, Vocabulary
from headrace_core.sampling import CONSTRAINTS
from headrace_engine.structured.backends.library import LibraryBackend, not_compiled
from headrace_engine.structured.choices import ChoiceGrammar
from headrace_engine.structured.numbers import MAX_INT64, Held, inexact_values
from headrace_engine.structured.schema import (
    MAX_WHITESPACE,
    entangled,
    parse_json,
    unsupported,
    within,
)
from headrace_engine.structured.structural_tag import inner_forms, parse_tag, schemas_of

if TYPE_CHECKING:
    import xgrammar

KEYWORDS = frozenset(
    {
        "$ref", "additionalProperties", "anyOf", "const", "enum", "items", "maxItems", "minItems",
        "prefixItems", "properties", "required", "type",
    }
)  # fmt: skip
"""Not ``minLength`` and ``maxLength``: its strings of a length hold control characters."""
HELD = Held(MAX_INT64)
FORMATS: frozenset[str] = frozenset()
COMPILE_THREADS = 1
END = b"<|end of the constraint|>"
"""A token behind the vocabulary that stands for the end."""


class XGrammarBackend(LibraryBackend):
    """See the module."""

    name = "xgrammar"
    library = "xgrammar"
    install = "pip install 'headrace-engine[xgrammar]'"
    releases_gil = frozenset(CONSTRAINTS) - {"choice"}

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        special = vocabulary.special_token_ids
        info = self._library.TokenizerInfo(
            [b"" if i in special else t for i, t in enumerate(vocabulary.tokens)] + [END],
            self._library.VocabType.RAW,
            vocab_size=vocabulary.size + 1,
            stop_token_ids=[vocabulary.size],
        )
        self._compiler: xgrammar.GrammarCompiler = self._library.GrammarCompiler(
            info, max_threads=COMPILE_THREADS, cache_enabled=False
        )

    @classmethod
    def refuse(cls, spec: GrammarSpec) -> list[str]:
        if spec.whitespace_pattern is not None:
            return ["whitespace_pattern: it has no such option"]
        if spec.kind == "json":
            return _schema_refusals(parse_json(spec.source, spec.kind))
        if spec.kind == "structural_tag":
            tag = parse_json(spec.source, spec.kind)
            reasons = [
                within(reason, pointer)
                for pointer, one in schemas_of(tag)
                for reason in _schema_refusals(one)
            ]
            return reasons + list(_endless(parse_tag(tag), "/format"))
        if spec.kind == "grammar" and "::=" not in spec.source:
            return ["grammar: only EBNF (root ::= ...), not Lark"]
        return []

    def compile(self, spec: GrammarSpec) -> XGrammarGrammar | ChoiceGrammar:
        if spec.kind == "choice":
            return self._choices(spec.source)
        make: Mapping[str, Callable[[], xgrammar.CompiledGrammar]] = {
            "json": lambda: self._schema(spec, spec.source),
            "json_object": lambda: self._schema(spec, '{"type": "object"}'),
            "regex": lambda: self._compiler.compile_regex(spec.source),
            "grammar": lambda: self._compiler.compile_grammar(spec.source),
            "structural_tag": lambda: self._compiler.compile_structural_tag(
                {"type": "structural_tag", "format": parse_tag(parse_json(spec.source, spec.kind))}
            ),
        }
        try:
            compiled = make[spec.kind]()
        except Exception as error:  # RuntimeError, and classes of its own that share no base
            raise not_compiled(spec.kind, str(error)) from None
        grammar = XGrammarGrammar(self._library, compiled, self.vocabulary)
        return self._satisfiable(spec.kind, grammar)

    def _schema(self, spec: GrammarSpec, text: str) -> xgrammar.CompiledGrammar:
        return self._compiler.compile_json_schema(
            text,
            any_whitespace=spec.any_whitespace,
            separators=None if spec.any_whitespace else (",", ":"),
            strict_mode=False,
            max_whitespace_cnt=MAX_WHITESPACE if spec.any_whitespace else None,
        )


def _endless(form: Mapping[str, Any], pointer: str) -> Iterator[str]:
    """Tags that may go on for ever and have no end."""
    if form["type"] == "tag" and _goes_on(form["content"]) and "" in (form["end"], *form["end"]):
        yield Refusal.of("end", pointer, "must not be empty where the content has no end")
    for at, inner in inner_forms(form, pointer):
        yield from _endless(inner, at)


def _goes_on(form: Mapping[str, Any]) -> bool:
    match form["type"]:
        case "any_text" | "triggered_tags":
            return True
        case "tags_with_separator":
            return not form.get("stop_after_first")
        case "sequence":
            return _goes_on(form["elements"][-1])
        case "or":
            return any(map(_goes_on, form["elements"]))
    return False


def _schema_refusals(schema: Any) -> list[str]:
    reasons = unsupported(schema, KEYWORDS, FORMATS) + entangled(schema)
    reasons += inexact_values(schema, HELD)
    if isinstance(schema, bool):
        reasons.append(Refusal.of(str(schema).lower(), "", "only schemas that are objects"))
    return reasons


class XGrammarGrammar:
    """A compiled grammar."""

    def __init__(
        self, library: Any, compiled: xgrammar.CompiledGrammar, vocabulary: Vocabulary
    ) -> None:
        self._library = library
        self._compiled = compiled
        self._vocabulary = vocabulary

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._library.GrammarMatcher(self._compiled), self._vocabulary.size)


class XGrammarMatcher:
    """One request's place in a grammar."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, size: int) -> None:
        self._matcher = matcher
        self._size = size
        self._room = np.zeros((1, -(-(size + 1) // 32)), np.int32)

    def fill_bitmask(self, bitmask: npt.NDArray[np.int32], row: int) -> None:
        room = self._room
        room[:] = -1  # a mask that allows everything is not written
        self._matcher.fill_next_token_bitmask(cast(Any, room), 0)
        room[0, self._size // 32] &= np.int32((1 << (self._size % 32)) - 1)
        bitmask[row] = room[0, : bitmask.shape[1]]

    def any_token(self) -> bool:
        """Whether any token may be next."""
        words = np.zeros((1, -(-self._size // 32)), np.int32)
        self.fill_bitmask(words, 0)
        return bool(words.any())

    def advance(self, token_ids: Sequence[int]) -> bool:
        for done, token_id in enumerate(token_ids):
            inside = 0 <= token_id < self._size
            if not (inside and self._matcher.accept_token(token_id)):
                self.roll_back(done)
                return False
        return True

    def roll_back(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_completed())

    @property
    def terminated(self) -> bool:
        return self.complete and not self.any_token()

    @property
    def failure(self) -> str:
        return ""
