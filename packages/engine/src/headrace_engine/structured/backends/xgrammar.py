"""xgrammar: JSON schemas, regexes, EBNF and structural tags. Imports torch.

Source: https://github.com/mlc-ai/xgrammar. Its converter passes over keywords that it does not
know; :data:`KEYWORDS` holds those that it was seen to enforce. Its readers of regexes and of EBNF read
other languages than guidance's do, and pass over what they do not know; so both are read here, and given to
it as the EBNF of a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from headrace_core.errors import HeadraceError
from headrace_core.grammar import GrammarSpec, Refusal, Vocabulary
from headrace_core.sampling.params import CONSTRAINTS
from headrace_engine.structured.backends.library import LibraryBackend
from headrace_engine.structured.choices import ChoiceGrammar
from headrace_engine.structured.grammars.ebnf_writer import to_ebnf
from headrace_engine.structured.grammars.gbnf import ROOT, Rule, is_lark, read
from headrace_engine.structured.grammars.regex import read_regex, regex_refusals
from headrace_engine.structured.numbers import MAX_INT64, HeldNumbers, inexact_values
from headrace_engine.structured.schema import (
    MAX_WHITESPACE,
    entangled,
    parse_json,
    unsupported,
    within,
)
from headrace_engine.structured.structural_tag import (
    TAG,
    Format,
    as_given,
    forms_of,
    inner_forms,
    parse_tag,
    reading_grammar,
    schemas_of,
)

if TYPE_CHECKING:
    import xgrammar

KEYWORDS = frozenset(
    {
        "$ref", "additionalProperties", "anyOf", "const", "enum", "items", "maxItems", "minItems",
        "prefixItems", "properties", "required", "type",
    }
)  # fmt: skip
"""Not ``minLength`` and ``maxLength``: its strings of a length hold control characters."""
HELD = HeldNumbers(MAX_INT64)
FORMATS: frozenset[str] = frozenset()
COMPILE_THREADS = 1
END = b"<|end of the constraint|>"
"""A token behind the vocabulary that stands for the end."""


class XGrammarBackend(LibraryBackend):
    """Grammars that xgrammar compiles and matches."""

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
            reasons += _tag_refusals(tag)
            return reasons + [
                Refusal.of(
                    "end", as_given(tag, at), "must not be empty where the content has no end"
                )
                for at in _endless(parse_tag(tag), TAG)
            ]
        if spec.kind == "regex":
            return regex_refusals(spec.source)
        return [_LARK] if spec.kind == "grammar" and is_lark(spec.source) else []

    def compile(self, spec: GrammarSpec) -> XGrammarGrammar | ChoiceGrammar:
        if spec.kind == "choice":
            return self._choices(spec.source)
        make: Mapping[str, Callable[[], xgrammar.CompiledGrammar]] = {
            "json": lambda: self._schema(spec, spec.source),
            "json_object": lambda: self._schema(spec, '{"type": "object"}'),
            "regex": lambda: self._compiler.compile_grammar(_regex_as_ebnf(spec.source)),
            "grammar": lambda: self._compiler.compile_grammar(to_ebnf(read(spec.source))),
            "structural_tag": lambda: self._compiler.compile_structural_tag(
                {
                    "type": "structural_tag",
                    "format": _readable_tag(parse_json(spec.source, spec.kind)),
                }
            ),
        }
        try:
            compiled = make[spec.kind]()
        except (HeadraceError, MemoryError, RecursionError):
            raise
        except Exception as error:  # RuntimeError, and classes of its own that share no base
            raise self._not_served(spec, str(error)) from None
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


_LARK = "only EBNF (root ::= ...), not Lark"


def _regex_as_ebnf(pattern: str) -> str:
    return to_ebnf({ROOT: Rule(read_regex(pattern), 1)})


def _tag_refusals(tag: Any) -> Iterator[str]:
    """Regexes and grammars in a structural tag that it reads otherwise."""
    for pointer, form in forms_of(tag):
        if form["type"] == "regex":
            for reason in regex_refusals(form["pattern"]):
                yield Refusal.of("pattern", as_given(tag, pointer), reason)
        if form["type"] == "grammar" and is_lark(form["grammar"]):
            yield Refusal.of("grammar", as_given(tag, pointer), _LARK)


def _readable_tag(tag: Any) -> Format:
    """The format tree of a structural tag, with its regexes and grammars as the EBNF of their trees."""

    def readable(form: Format, pointer: str) -> Format:
        if form["type"] == "regex":
            return {"type": "grammar", "grammar": _regex_as_ebnf(form["pattern"])}
        if form["type"] == "grammar":
            with reading_grammar(tag, pointer):
                return {"type": "grammar", "grammar": to_ebnf(read(form["grammar"]))}
        made = dict(form)
        for key in ("elements", "tags"):
            if key in form:
                made[key] = [
                    readable(inner, f"{pointer}/{key}/{i}") for i, inner in enumerate(form[key])
                ]
        if isinstance(form.get("content"), Mapping):
            made["content"] = readable(form["content"], f"{pointer}/content")
        return made

    return readable(parse_tag(tag), TAG)


def _endless(form: Mapping[str, Any], pointer: str) -> Iterator[str]:
    """JSON pointers of the tags that may go on for ever and have no end."""
    if form["type"] == "tag" and _goes_on(form["content"]) and "" in (form["end"], *form["end"]):
        yield pointer
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
        """True if any token may be next."""
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
