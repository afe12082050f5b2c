"""lm-format-enforcer: regexes in Python's dialect, choices, and plain JSON objects.

Source: https://github.com/noamgat/lm-format-enforcer. The library parses character by character, in
Python; its own search for tokens takes up to seconds with large vocabularies, and is done here. Its JSON
parser lets optional properties end with a comma and numbers lack digits, so only schemas without numbers go
to it whose properties are all required. It keeps one stack for all alternatives, so these must be objects,
and it counts items of lists only up to one.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace_core.errors import HeadraceError
from headrace_core.grammar import GrammarSpec, Refusal, Vocabulary, malformed, refuse
from headrace_engine.structured.backends.library import LibraryBackend
from headrace_engine.structured.backends.token_automaton import TokenAutomaton, TokenCharacters
from headrace_engine.structured.choices import ChoiceGrammar
from headrace_engine.structured.grammars.gbnf import LAST_CHARACTER, Characters, Node
from headrace_engine.structured.grammars.regex import (
    as_regex,
    leaves,
    named_ranges,
    read_regex,
    regex_refusals,
)
from headrace_engine.structured.schema import entangled, parse_json, subschemas, unsupported
from headrace_engine.structured.state_matcher import StateMatcher, Words

if TYPE_CHECKING:
    from lmformatenforcer import CharacterLevelParser, RegexParser

logger = logging.getLogger(__name__)

KEPT_MASKS = 256
"""States of one regex whose masks are kept."""
_WHOLE = "it writes whole characters only, and the vocabulary has no token for"
KEYWORDS = frozenset(
    {"additionalProperties", "anyOf", "enum", "items", "maxItems", "minItems", "properties", "required",
     "type"}
)  # fmt: skip


class EnforcerBackend(LibraryBackend):
    """Grammars that lm-format-enforcer compiles and matches."""

    name = "lm-format-enforcer"
    library = "lmformatenforcer"
    install = "pip install 'headrace-engine[lm-format-enforcer]'"

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        texts = ((token_id, _text(token)) for token_id, token in self._text_tokens())
        self.texts = {token_id: text for token_id, text in texts if text}
        # Every token is given as the beginning of a word, so that its text is its own. JSON strings
        # would hold any character that a token has.
        self._tokens = self._import(f"{self.library}.tokenenforcer").TokenEnforcerTokenizerData(
            [(i, text, True) for i, text in self.texts.items() if min(text) >= " "],
            lambda ids: "".join(self.texts[i] for i in ids),
            vocabulary.size,
            False,
            vocabulary.size + 1,
        )
        self.parser_config = self._library.CharacterLevelParserConfig(
            alphabet=self._tokens.tokenizer_alphabet
        )
        self.interegular_fsm = self._import("interegular.fsm")
        self._free_texts: dict[tuple[int, int], npt.NDArray[np.int64]] = {}

    @cached_property
    def characters(self) -> TokenCharacters:
        """The characters of all tokens that are text; made for the first regex."""
        return TokenCharacters(self.texts)

    @classmethod
    def refuse(cls, spec: GrammarSpec) -> list[str]:
        if spec.kind not in ("json", "regex", "choice"):
            return [f"{spec.kind}: only json, regex and choice"]
        if spec.whitespace_pattern is not None or not spec.any_whitespace:
            return ["whitespace_pattern: it has no option for white space"]
        if spec.kind == "regex":
            return regex_refusals(spec.source)
        if spec.kind != "json":
            return []
        schema = parse_json(spec.source, spec.kind)
        return (
            unsupported(schema, KEYWORDS, frozenset()) + entangled(schema) + list(_peculiar(schema))
        )

    def compile(self, spec: GrammarSpec) -> RegexGrammar | SchemaGrammar | ChoiceGrammar:
        if spec.kind == "choice":
            return self._choices(spec.source)
        try:
            if spec.kind == "regex":
                tree = read_regex(spec.source)
                self._check(spec, self._regex_reasons(tree))
                return RegexGrammar(as_regex(tree), self)
            schema = parse_json(spec.source, spec.kind)
            self._check(spec, self._schema_reasons(schema))
            return SchemaGrammar(schema, self)
        except RecursionError:
            raise malformed(spec.kind, "nested too deep") from None
        except (MemoryError, HeadraceError):
            raise
        except Exception:  # of interegular: classes that share no base
            raise self._not_served(spec) from None

    @cached_property
    def _codes(self) -> list[int]:
        """The code points that are a token each, sorted."""
        return sorted({ord(text) for text in self.texts.values() if len(text) == 1})

    def _check(self, spec: GrammarSpec, reasons: Iterable[str]) -> None:
        """Raises UnsupportedFeature for the first reason, if there is one."""
        for reason in reasons:
            raise refuse(spec, [reason])

    def _regex_reasons(self, tree: Node) -> Iterator[str]:
        for leaf in leaves(tree):
            yield from self._unwritten(named_ranges(leaf))
            if isinstance(leaf, Characters) and leaf.ranges[-1][1] == LAST_CHARACTER:
                codes = self._codes
                starts = (bisect_left(codes, low) for low, _ in leaf.ranges)
                if not any(
                    at < len(codes) and codes[at] <= high
                    for at, (_, high) in zip(starts, leaf.ranges)
                ):
                    yield f"{_WHOLE} none of a class that holds nearly all but ASCII"

    def _schema_reasons(self, schema: Any) -> Iterator[str]:
        for pointer, found in subschemas(schema):
            if not isinstance(found, Mapping):
                continue
            for keyword in ("enum", "properties"):
                for text in found.get(keyword, ()):
                    for reason in self._unwritten([(ord(c), ord(c)) for c in text]):
                        yield Refusal.of(keyword, pointer, reason)

    def _unwritten(self, ranges: Iterable[tuple[int, int]]) -> Iterator[str]:
        """The reason that these characters cannot be written: the first of each range that is not a token."""
        codes = self._codes
        for low, high in ranges:
            code, at = max(low, 0x80), bisect_left(codes, max(low, 0x80))
            while code <= high and at < len(codes) and codes[at] == code:
                code, at = code + 1, at + 1
            if code <= high:
                yield f"{_WHOLE} {chr(code)!r}"

    def regex_parser(self, pattern: str) -> RegexParser:
        """The library's parser of a regex."""
        made: RegexParser = self._library.RegexParser(pattern)
        return made

    def schema_parser(self, schema: Any) -> CharacterLevelParser:
        """The library's parser of a schema."""
        made: CharacterLevelParser = self._library.JsonSchemaParser(schema)
        return made

    def mask_of(self, parser: CharacterLevelParser) -> Words:
        """The tokens that a parser takes, [ceil(V / 32)]."""
        allowed = np.zeros(self.vocabulary.num_words * 32, np.uint8)
        key = parser.shortcut_key()
        free = isinstance(key, tuple) and key[0] == "json_freetext"
        if free:
            allowed[self._free_text(*key[1:])] = 1
        pending = [(parser, self._tokens.tokenizer_tree.root, free)]
        while pending:
            parser, node, only_quotes = pending.pop()
            allowed[node.tokens] = 1
            characters = set(parser.get_allowed_characters()).intersection(node.children)
            pending += [
                (parser.add_character(character), node.children[character], False)
                for character in (characters & {'"'} if only_quotes else characters)
            ]
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def _free_text(self, length: int, least: int, most: int) -> npt.NDArray[np.int64]:
        """The tokens that go on within a JSON string of so many characters, or close it; the library has
        them in lists, each of which becomes an array once."""
        known = self._tokens.tokenizer_tree.json_freetext_tokens
        wanted = max(0, least - length), min(known.max_token_len, most - length)
        wanted = min(known.max_token_len, wanted[0]), wanted[1]
        if wanted not in self._free_texts:
            found = known.lookup_allowed_tokens(*wanted).allowed_tokens
            self._free_texts[wanted] = np.asarray(found, np.int64)
        return self._free_texts[wanted]


def _text(token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return ""  # a part of a character, of which it knows nothing


def _plain_string(value: Any) -> bool:
    return isinstance(value, str) and json.dumps(value, ensure_ascii=False) == f'"{value}"'


def _is_object(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "object"


def _peculiar(schema: Any) -> list[str]:
    reasons: list[str] = []
    for pointer, found in subschemas(schema):
        if found is False and pointer.endswith("/additionalProperties"):
            continue  # others than the named ones are never written
        if isinstance(found, bool):
            reasons.append(Refusal.of(str(found).lower(), pointer, "no schema of this kind"))
            continue
        named, required = found.get("properties", {}), found.get("required", [])
        is_empty = "properties" in found and found.get("additionalProperties") is False
        if found.get("type") == "object" and not (
            set(named) == set(required) and (named or is_empty)
        ):
            reasons.append(
                Refusal.of(
                    "required", pointer, "every object must name its properties, all required"
                )
            )
        if "enum" in found and not all(map(_plain_string, found["enum"])):
            reasons.append(Refusal.of("enum", pointer, "only of strings without escapes"))
        if found.get("type") in ("integer", "number"):
            reasons.append(Refusal.of("type", pointer, "its numbers are not JSON's"))
        if not all(_is_object(one) for one in found.get("anyOf", ())):
            reasons.append(Refusal.of("anyOf", pointer, "only of objects"))
        if found.get("minItems", 0) > 1:
            reasons.append(Refusal.of("minItems", pointer, "it counts only up to 1"))
        if found.get("maxItems", 1) < 1:
            reasons.append(Refusal.of("maxItems", pointer, "it lets one item pass"))
        if found.get("type") == "array" and "items" not in found:
            reasons.append(Refusal.of("type", pointer, "every array must have 'items'"))
        if not found.keys() & {"type", "enum", "anyOf"}:
            reasons.append(Refusal.of("type", pointer, "must be stated"))
        if isinstance(found.get("type"), list):
            reasons.append(Refusal.of("type", pointer, "only one type"))
    return reasons


class RegexGrammar:
    """A regex as an automaton, and the masks of the states that were met.

    Args:
        pattern: in Python's dialect.
        backend: its library's interegular parses it.
    """

    def __init__(self, pattern: str, backend: EnforcerBackend) -> None:
        context = backend.regex_parser(pattern).context
        others = backend.interegular_fsm.anything_else
        self.automaton = TokenAutomaton(context.pattern, others, backend.characters)
        self.start = self.automaton.start
        self._texts = backend.texts
        self._num_words = backend.vocabulary.num_words
        self.mask = lru_cache(KEPT_MASKS)(self._mask)
        self.mask(self.start)

    def matcher(self) -> StateMatcher[int]:
        return StateMatcher(self)

    def after(self, state: int, token_id: int) -> int | None:
        """The state behind a token; None: the state does not take it."""
        text = self._texts.get(token_id)
        return self.automaton.after(state, text) if text else None

    def is_final(self, state: int) -> bool:
        """True if the text that leads to this state is complete."""
        return self.automaton.is_final(state)

    def _mask(self, state: int) -> Words:
        allowed = np.zeros(self._num_words * 32, np.uint8)
        allowed[self.automaton.allowed(state)] = 1
        return np.packbits(allowed, bitorder="little").view(np.int32)


class SchemaGrammar:
    """A JSON schema whose parsers are made one for each request."""

    def __init__(self, schema: Any, backend: EnforcerBackend) -> None:
        self.backend = backend
        self._schema = schema
        self.first_mask = backend.mask_of(self.parser())
        """Mask of the first token, [ceil(V / 32)]; it is made here, where nobody waits."""

    def parser(self) -> CharacterLevelParser:
        """A parser of its own for each request: parsers share what they write down."""
        parser = self.backend.schema_parser(self._schema)
        parser.config = self.backend.parser_config
        return parser

    def matcher(self) -> SchemaMatcher:
        return SchemaMatcher(self)


class SchemaMatcher:
    """One request's place: the library's parser after each token."""

    def __init__(self, grammar: SchemaGrammar) -> None:
        self._backend = grammar.backend
        self._parsers = [grammar.parser()]
        self._words = {1: grammar.first_mask}
        """Number of parsers -> mask of the next token; the latest only."""
        self._failed = False

    def fill_bitmask(self, bitmask: Words, row: int) -> None:
        bitmask[row] = self._mask()

    def advance(self, token_ids: Sequence[int]) -> bool:
        for done, token_id in enumerate(token_ids):
            words = self._mask()
            inside = 0 <= token_id < 32 * len(words)
            if not inside or not (int(words[token_id // 32]) >> (token_id % 32)) & 1:
                self.roll_back(done)
                return False
            parser = self._parsers[-1]
            with self._failures_noted():
                for character in self._backend.texts[token_id]:
                    parser = parser.add_character(character)
            if self._failed:
                return False
            self._parsers.append(parser)
        return True

    def roll_back(self, num_tokens: int) -> None:
        if num_tokens:
            del self._parsers[-num_tokens:]
            self._words.clear()

    @property
    def complete(self) -> bool:
        return bool(self._parsers[-1].can_end())

    @property
    def terminated(self) -> bool:
        return self.complete and not self._mask().any()

    @property
    def failure(self) -> str:
        return "the library's parser failed" if self._failed else ""

    def _mask(self) -> Words:
        count = len(self._parsers)
        if count not in self._words:
            self._words = {count: np.zeros(self._backend.vocabulary.num_words, np.int32)}
            with self._failures_noted():
                self._words = {count: self._backend.mask_of(self._parsers[-1])}
        return self._words[count]

    @contextmanager
    def _failures_noted(self) -> Iterator[None]:
        """A failure of the library's parser ends this request, not the step of all."""
        try:
            yield
        except MemoryError:
            raise
        except Exception:  # the library raises bare ones, and whatever its slips come to
            logger.exception("lm-format-enforcer's parser failed")
            self._failed = True
