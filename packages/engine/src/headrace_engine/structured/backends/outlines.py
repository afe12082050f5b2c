"""outlines-core: regexes, and JSON schemas as regexes, over an index of all tokens by state.

Source: https://github.com/dottxt-ai/outlines-core. The index takes time and memory with the size
of vocabulary and regex; a step is a look-up. From a text that is
complete its index (0.2.14) never goes on to one that is not: ``yes(, but)?`` gives ``yes`` only.
Its schemas pass over keywords that they do not know;
:data:`KEYWORDS` holds those that they were seen to enforce.
"""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace_core.grammar import GrammarSpec, Refusal, Vocabulary
from headrace_engine.structured.backends.library import LibraryBackend
from headrace_engine.structured.choices import ChoiceGrammar
from headrace_engine.structured.grammars.regex import (
    NotRead,
    as_regex,
    read_regex,
    regex_refusals,
)
from headrace_engine.structured.numbers import MAX_DIGITS, MAX_INT64, HeldNumbers, inexact_values
from headrace_engine.structured.schema import (
    entangled,
    is_recursive,
    parse_json,
    subschemas,
    unsupported,
)
from headrace_engine.structured.state_matcher import StateMatcher

if TYPE_CHECKING:
    import outlines_core

KEYWORDS = frozenset(
    {
        "$ref", "additionalProperties", "anyOf", "const", "enum", "items", "maxItems",
        "maxLength", "minItems", "minLength", "properties", "required", "type",
    }
)  # fmt: skip
HELD = HeldNumbers(MAX_INT64, MAX_DIGITS)
FORMATS: frozenset[str] = frozenset({"date", "uuid"})
_ANCHOR = re.compile(r"(?<![\[\\])\^|(?<!\\)\$|\\[AbBz]")
"""Anchors within a regex, which its index does not follow."""
KEPT_MASKS = 256
"""States of one grammar whose masks are kept."""


class OutlinesBackend(LibraryBackend):
    """Grammars that outlines-core compiles and matches."""

    name = "outlines"
    library = "outlines_core"
    install = "pip install 'headrace-engine[outlines]'"

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        ids: dict[bytes, list[int]] = {}
        for token_id, token in self._text_tokens():
            ids.setdefault(token, []).append(token_id)
        self._words = self._library.Vocabulary(vocabulary.size, ids)

    @classmethod
    def refuse(cls, spec: GrammarSpec) -> list[str]:
        if spec.kind in ("grammar", "structural_tag"):
            return [f"{spec.kind}: only json, json_object, regex and choice"]
        if not spec.any_whitespace:
            return ["disable_any_whitespace: it has no such option"]
        if spec.kind == "regex":
            return regex_refusals(spec.source) if _ANCHOR.search(_anchored(spec.source)) else []
        if spec.kind != "json":
            return []
        schema = parse_json(spec.source, spec.kind)
        reasons = unsupported(schema, KEYWORDS, FORMATS) + entangled(schema) + _peculiar(schema)
        return reasons + list(inexact_values(schema, HELD))

    def compile(self, spec: GrammarSpec) -> OutlinesGrammar | ChoiceGrammar:
        if spec.kind == "choice":
            return self._choices(spec.source)
        try:
            index = self._library.Index(self._regex(spec), self._words)
        except ValueError as error:
            raise self._not_served(spec, str(error)) from None
        return OutlinesGrammar(index, self.vocabulary)

    def _regex(self, spec: GrammarSpec) -> str:
        if spec.kind == "regex":
            return _anchored(spec.source)
        text = spec.source or '{"type": "object"}'
        regex: str = self._library.json_schema.build_regex_from_schema(
            text, spec.whitespace_pattern
        )
        return regex


def _anchored(pattern: str) -> str:
    """The regex without ``^`` and ``$`` around it, which it refuses, as far as that can be said."""
    try:
        return as_regex(read_regex(pattern))
    except NotRead:
        return pattern


def _peculiar(schema: Any) -> list[str]:
    """Keywords that its translation of schemas treats otherwise than the standard."""
    reasons: list[str] = []
    if is_recursive(schema):
        reasons.append(Refusal.of("$ref", "", "its schemas are not recursive"))
    for pointer, found in subschemas(schema):
        if found is False and pointer.endswith("/additionalProperties"):
            continue  # others than the named ones are never written
        if isinstance(found, bool) or not found:
            reasons.append(Refusal.of("true", pointer, "only schemas that say something"))
            continue
        named = found.get("properties", {})
        odd = [name for name in named if json.dumps(name, ensure_ascii=False) != f'"{name}"']
        if odd:
            reasons.append(
                Refusal.of("properties", pointer, f"the name {odd[0]!r:.80} needs escapes")
            )
        if isinstance(found.get("type"), list) and len(found) > 1:
            reasons.append(Refusal.of("type", pointer, "several types beside other keywords"))
    return reasons


class OutlinesGrammar:
    """An index, and masks of the states that were met."""

    def __init__(self, index: outlines_core.Index, vocabulary: Vocabulary) -> None:
        self.index = index
        self.size = vocabulary.size
        self.start: int = index.get_initial_state()
        self.mask = functools.lru_cache(KEPT_MASKS)(self._mask)

    def matcher(self) -> StateMatcher[int]:
        return StateMatcher(self)

    def after(self, state: int, token_id: int) -> int | None:
        """The state behind a token; None: the state does not take it."""
        return self.index.get_next_state(state, token_id) if 0 <= token_id < self.size else None

    def is_final(self, state: int) -> bool:
        """True if the text that leads to this state is complete."""
        return bool(self.index.is_final_state(state))

    def _mask(self, state: int) -> npt.NDArray[np.int32]:
        """[ceil(V / 32)] int32."""
        allowed = np.zeros(-(-(self.size + 1) // 32) * 32, np.uint8)
        ids = self.index.get_allowed_tokens(state)
        if ids:
            allowed[np.asarray(ids, np.int64)] = 1
        allowed[self.size] = 0  # stands for the end
        words = np.packbits(allowed, bitorder="little").view(np.int32)
        return words[: -(-self.size // 32)]
