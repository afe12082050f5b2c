"""llguidance: JSON schemas, regexes, EBNF, Lark and structural tags; compiles in milliseconds.

Source: https://github.com/guidance-ai/llguidance (docs/syntax.md, docs/json_schema.md).
"""

from __future__ import annotations

import functools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from headrace_core.errors import RequestError
from headrace_core.grammar import (
    Grammar,
    GrammarMatcher,
    GrammarSpec,
    Refusal,
    Vocabulary,
    malformed,
    refuse,
)
from headrace_core.sampling.params import CONSTRAINTS
from headrace_engine.structured.backends.library import UNKNOWN, LibraryBackend, not_compiled
from headrace_engine.structured.blame import blame
from headrace_engine.structured.choices import ChoiceGrammar
from headrace_engine.structured.grammars.lark_writer import as_lark
from headrace_engine.structured.numbers import (
    MAX_DIGITS,
    MAX_DOUBLE_INT,
    HeldNumbers,
    inexact_values,
    narrow_bounds,
    with_exact_bounds,
)
from headrace_engine.structured.schema import (
    MAX_WHITESPACE,
    parse_json,
    subschemas,
    unsupported,
    within,
)
from headrace_engine.structured.spelling import spell
from headrace_engine.structured.structural_tag import (
    forms_of,
    misplaced,
    reading_grammar,
    regex_literal,
    schemas_of,
    tag_grammar,
    tag_refusals,
)
from headrace_engine.structured.wording import place, plain

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

KEYWORDS = frozenset(
    {
        "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "enum",
        "exclusiveMaximum", "exclusiveMinimum", "format", "items", "maxItems", "maxLength",
        "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum",
        "multipleOf", "oneOf", "pattern", "patternProperties", "prefixItems", "properties",
        "required", "type",
    }
)  # fmt: skip
FORMATS = frozenset(
    {
        "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown",
        "uri", "uuid",
    }
)  # fmt: skip
HELD = HeldNumbers(MAX_DOUBLE_INT, MAX_DIGITS)
MAX_LEXER_STATES = 50_000
"""About 100 MB at most for one request's matcher."""
MAX_STEP_ITEMS = 4_000
"""Items of its parser that one step may make. A step looks at them in pairs, so that the library's
own 50,000 are seconds; an object of 480 optional properties needs 2,000."""
MAX_OPTIONAL = 350
"""Properties of an object that are not required; each takes some four items of a step."""
MAX_STEP_FUEL = 50_000
"""Work of its lexer in one step, some 4 ms."""
MAX_THREADS = 4
"""Threads that fill masks of several requests at once."""
SLOW_MASK = 1e-3
"""Processor time for a mask, in seconds, after which a thread of the library takes the token."""

_NOTHING_FOLLOWS = "NoExtension"
"""Name of the error of a grammar that no text satisfies, which is not the matcher's."""
END = "<|end of the constraint|>"
"""Name of a token behind the vocabulary: where it is allowed, the output is complete."""


class GuidanceBackend(LibraryBackend):
    """Grammars that llguidance compiles and matches."""

    name = "guidance"
    library = "llguidance"
    install = "pip install 'llguidance>=1.9,<2'"
    releases_gil = frozenset(CONSTRAINTS) - {"choice"}

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        llguidance = self._library
        self._tokenizer: LLTokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary)),
            n_vocab=vocabulary.size + 1,
            eos_token=vocabulary.size,
        )
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES,
            step_max_items=MAX_STEP_ITEMS,
            step_lexer_fuel=MAX_STEP_FUEL,
            verbose_errors=False,
        )
        self._executor = llguidance.LLExecutor(min(MAX_THREADS, os.cpu_count() or 1))

    @classmethod
    def refuse(cls, spec: GrammarSpec) -> list[str]:
        if spec.kind == "json":
            return _schema_refusals(parse_json(spec.source, spec.kind))
        if spec.kind == "structural_tag":
            return tag_refusals(parse_json(spec.source, spec.kind), _schema_refusals)
        return []

    def compile(self, spec: GrammarSpec) -> GuidanceGrammar | ChoiceGrammar:
        if spec.kind == "choice":
            return self._choices(spec.source)
        if spec.whitespace_pattern is not None:
            self._check_whitespace(spec.whitespace_pattern)
        try:
            text = self._text(spec)
        except RequestError:
            if spec.kind == "structural_tag":
                self._check_tag(parse_json(spec.source, spec.kind))
            raise
        try:
            return self._compiled(spec, text)
        except RequestError:
            # Cut into characters, a grammar may be too much for the library.
            uncut = as_lark(spec.source, cut=False).text if spec.kind == "grammar" else text
            if uncut == text:
                raise
            return self._compiled(spec, uncut)

    def _compiled(self, spec: GrammarSpec, text: str) -> GuidanceGrammar:
        matcher = self._matcher(text)
        if matcher.is_error():
            raise self._error(spec, matcher.get_error())
        return self._satisfiable(spec.kind, self._grammar(matcher))

    def _grammar(self, matcher: LLMatcher) -> GuidanceGrammar:
        return GuidanceGrammar(matcher, self.vocabulary, self._consume)

    @functools.cached_property
    def _consume(self) -> _ReleasingConsumer:
        return _ReleasingConsumer(self._executor, self._matcher('start: "a"'))

    def is_worn(self, grammar: Grammar) -> bool:
        return isinstance(grammar, GuidanceGrammar) and grammar.worn

    def fill_bitmasks(
        self, rows: Sequence[tuple[GrammarMatcher, int]], bitmask: npt.NDArray[np.int32]
    ) -> None:
        several: list[tuple[GuidanceMatcher, int]] = []
        for matcher, row in rows:
            if isinstance(matcher, GuidanceMatcher) and len(rows) > 1:
                several.append((matcher, row))
            else:
                matcher.fill_bitmask(bitmask, row)
        if several:
            self._fill_together(several, bitmask)

    def _fill_together(
        self, rows: Sequence[tuple[GuidanceMatcher, int]], bitmask: npt.NDArray[np.int32]
    ) -> None:
        matchers = [matcher for matcher, _ in rows]
        room = np.zeros((len(rows), -(-(self.vocabulary.size + 1) // 32)), np.int32)
        self._executor.unsafe_compute_mask_ptr(
            [(matcher.library_matcher, i) for i, matcher in enumerate(matchers)],
            room.ctypes.data,
            room.shape[1] * 4,
            len(rows),
        )
        for i, (matcher, (_, row)) in enumerate(zip(matchers, rows)):
            matcher.take_mask(room[i], bitmask, row)

    def _check_whitespace(self, pattern: str) -> None:
        """Raises RequestError unless a pattern is a regex of white space that JSON allows."""
        kind, pattern = "whitespace_pattern", _json_space(pattern)
        alone = self._matcher(self._library.LLMatcher.grammar_from_regex(pattern))
        if alone.is_error():
            raise not_compiled(kind, alone.get_error())
        lark = f"start: W\nW: {regex_literal(f'(?:{pattern})')} & ~/[ \\t\\r\\n]*/\n"
        others = self._grammar(self._matcher(lark)).matcher()
        found = np.zeros((1, self.vocabulary.num_words), np.int32)
        others.fill_bitmask(found, 0)
        if others.failure:
            raise not_compiled(kind, others.failure)
        if found.any():
            raise malformed(
                kind,
                f"{pattern!r:.100} matches more than white space: must match nothing but the characters "
                "that JSON allows between its tokens, [ \\t\\r\\n]",
            )

    def _matcher(self, grammar: str) -> LLMatcher:
        made: LLMatcher = self._library.LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=self._limits
        )
        return made

    def _text(self, spec: GrammarSpec) -> str:
        """The constraint in the library's own form."""
        make: Callable[[GrammarSpec], str] = {
            "json": self._json,
            "json_object": self._json,
            "regex": lambda spec: self._library.LLMatcher.grammar_from_regex(spec.source),
            "grammar": lambda spec: as_lark(spec.source).text,
            "structural_tag": lambda spec: tag_grammar(
                parse_json(spec.source, spec.kind),
                self.vocabulary,
                lambda schema: json.dumps(
                    {**with_exact_bounds(schema), "x-guidance": _json_options(spec)}
                    if isinstance(schema, dict) else schema
                ),
                lambda source: as_lark(source).text,
            ),
        }[spec.kind]  # fmt: skip
        return make(spec)

    def _json(self, spec: GrammarSpec) -> str:
        schema = parse_json(spec.source, spec.kind) if spec.source else {"type": "object"}
        source = json.dumps(with_exact_bounds(schema))
        grammar: str = self._library.LLMatcher.grammar_from_json_schema(
            source, overrides=cast(Any, _json_options(spec))
        )
        return grammar

    def _error(self, spec: GrammarSpec, message: str) -> RequestError:
        if spec.kind == "json":
            refusal = self._refusal(spec, parse_json(spec.source, spec.kind), message)
            return refuse(spec, [refusal])
        if spec.kind == "structural_tag":
            self._check_tag(parse_json(spec.source, spec.kind))
            for pointer, schema in schemas_of(parse_json(spec.source, spec.kind)):
                found = self._schema_error(spec, schema)
                if found:
                    return refuse(spec, [within(self._refusal(spec, schema, found), pointer)])
        where = _place(spec.source, message) if spec.kind == "grammar" else ""
        return not_compiled(spec.kind, message, where)

    def _check_tag(self, tag: Any) -> None:
        """Raises RequestError that names the regex or grammar in a structural tag that it does not take."""
        for pointer, form in forms_of(tag):
            if form["type"] == "regex":
                text = self._library.LLMatcher.grammar_from_regex(form["pattern"])
                message = self._matcher(text).get_error()
                if message:
                    raise misplaced(tag, pointer, "pattern", plain(message) or UNKNOWN)
            if form["type"] == "grammar":
                with reading_grammar(tag, pointer):
                    text = as_lark(form["grammar"]).text
                message = self._matcher(text).get_error()
                if message:
                    where = _place(form["grammar"], message)
                    raise misplaced(tag, pointer, "grammar", where + (plain(message) or UNKNOWN))

    def _refusal(self, spec: GrammarSpec, schema: Any, message: str) -> Refusal:
        """The part of a schema that the library's message means."""

        def error_of(part: Any) -> str:
            message = self._schema_error(spec, part)
            return message and (plain(message) or UNKNOWN)

        schema = with_exact_bounds(schema)
        return Refusal.of(*blame(schema, error_of, plain(message) or UNKNOWN))

    def _schema_error(self, spec: GrammarSpec, schema: Any) -> str:
        """The library's objection to a schema; "" = nothing."""
        text = self._library.LLMatcher.grammar_from_json_schema(
            json.dumps(with_exact_bounds(schema)), overrides=cast(Any, _json_options(spec))
        )
        return str(self._matcher(text).get_error() or "")


def _place(source: str, message: str) -> str:
    """The place in the source that the library's message means; "" if it names none."""
    found, lines = place(message), as_lark(source).lines
    if found is None:
        return ""
    line, column = found
    if not lines:
        return f"line {line} column {column}: " if column else f"line {line}: "
    return f"line {lines[min(line, len(lines)) - 1]}: "


def _schema_refusals(schema: Any) -> list[str]:
    return [
        *unsupported(schema, KEYWORDS, FORMATS),
        *inexact_values(schema, HELD),
        *narrow_bounds(schema),
        *_many_optional(schema),
    ]


def _many_optional(schema: Any) -> Iterator[Refusal]:
    """Objects that its parser gives up on: after each property it looks at all that may follow."""
    for pointer, found in subschemas(schema):
        named = found.get("properties", {}) if isinstance(found, Mapping) else {}
        optional = len(named) and len(named.keys() - set(found.get("required", [])))
        if optional > MAX_OPTIONAL:
            reason = f"{optional} of them are not required: must be at most {MAX_OPTIONAL}"
            yield Refusal.of("properties", pointer, reason)


def _json_space(pattern: str) -> str:
    r"""A regex in which ``\s`` is the white space of JSON, which is less than that of Unicode."""
    return re.sub(
        r"\\(.)", lambda m: r"[ \t\r\n]" if m[1] == "s" else m[0], pattern, flags=re.DOTALL
    )


def _json_options(spec: GrammarSpec) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if spec.whitespace_pattern is not None:
        options["whitespace_pattern"] = _json_space(spec.whitespace_pattern)
    elif spec.any_whitespace:
        options["whitespace_pattern"] = rf"[ \t\n\r]{{1,{MAX_WHITESPACE}}}"
    else:
        options["whitespace_flexible"] = False
    return options


class _Tokens:
    """The vocabulary as the library asks for it, with :data:`END` behind its last token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.tokens = [*vocabulary.tokens, END.encode()]
        self.special_token_ids = sorted(vocabulary.special_token_ids | {vocabulary.size})
        self.eos_token_id = vocabulary.size
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        """Spelling of text that is forced anyway."""
        try:
            return spell(self._vocabulary, text.encode() if isinstance(text, str) else text)
        except ValueError:
            return []


class _ReleasingConsumer:
    """Takes a token in one of the library's threads, without the interpreter's lock.

    A matcher's own methods keep the lock, and so does the executor for a single matcher: a second one goes
    along, which has failed and does nothing.

    Args:
        executor: the library's threads.
        failed: a matcher that has taken nothing; it is made to fail.
    """

    def __init__(self, executor: LLExecutor, failed: LLMatcher) -> None:
        self._executor = executor
        self._failed = failed
        failed.consume_token(0)

    def __call__(self, matcher: LLMatcher, token_id: int) -> bool:
        """True if the matcher takes the token; one that does not has failed."""
        companion = self._failed.deep_copy()  # one matcher is used by one call at a time
        return bool(self._executor.consume_token_par([(matcher, token_id), (companion, 0)])[0])


class GuidanceGrammar:
    """A compiled grammar: a matcher that takes no tokens, copied for each request.

    The copies share the states of one lexer. Once it has come to a limit, every copy fails.
    """

    def __init__(
        self, prototype: LLMatcher, vocabulary: Vocabulary, consume: _ReleasingConsumer
    ) -> None:
        self.worn = False
        """Set by the first matcher that has failed."""
        self.consume = consume
        self._prototype = prototype
        self._vocabulary = vocabulary
        self._lock = threading.Lock()

    def matcher(self) -> GuidanceMatcher:
        with self._lock:
            return GuidanceMatcher(self._prototype.deep_copy(), self._vocabulary, self)


class GuidanceMatcher:
    """One request's place in a grammar."""

    def __init__(
        self, matcher: LLMatcher, vocabulary: Vocabulary, grammar: GuidanceGrammar
    ) -> None:
        self.library_matcher = matcher
        self._grammar = grammar
        self._size = vocabulary.size
        self._room = np.zeros(-(-(vocabulary.size + 1) // 32), np.int32)
        self._is_slow = False
        """The next token's mask is in :attr:`_room`, and took long."""

    def fill_bitmask(self, bitmask: npt.NDArray[np.int32], row: int) -> None:
        room, start = self._room, time.thread_time()
        self.library_matcher.unsafe_compute_mask_ptr(room.ctypes.data, room.nbytes)
        self._is_slow = time.thread_time() - start > SLOW_MASK
        self.take_mask(room, bitmask, row)

    def take_mask(
        self, words: npt.NDArray[np.int32], bitmask: npt.NDArray[np.int32], row: int
    ) -> None:
        """Copy the library's mask, which has a bit for :data:`END`, to a row of a bitmask."""
        if self.library_matcher.is_error():
            bitmask[row] = 0  # it gave up: its own limits, most likely
            self._grammar.worn |= bool(self.failure)
            return
        words[self._size // 32] &= _without_bit(self._size % 32)
        bitmask[row] = words[: bitmask.shape[1]]

    def advance(self, token_ids: Sequence[int]) -> bool:
        tokens = list(token_ids)
        if any(not 0 <= token_id < self._size for token_id in tokens):
            return False
        if self._is_slow and len(tokens) == 1 and self._allows(tokens[0]):
            self._is_slow = False
            if self._grammar.consume(self.library_matcher, tokens[0]):
                return True
            self._grammar.worn |= bool(self.failure)
            return False
        self._is_slow = False
        taken = self.library_matcher.try_consume_tokens(tokens)
        if taken < len(tokens):
            self._grammar.worn |= bool(self.failure)
            self.roll_back(taken)
            return False
        return True

    def _allows(self, token_id: int) -> bool:
        """True if the mask that was filled last has a token."""
        word = int(self._room[token_id // 32])
        return bool(word >> (token_id % 32) & 1) and not self.library_matcher.is_error()

    def roll_back(self, num_tokens: int) -> None:
        if num_tokens:
            self._is_slow = False
            self.library_matcher.rollback(num_tokens)

    @property
    def complete(self) -> bool:
        return bool(self.library_matcher.is_accepting())

    @property
    def terminated(self) -> bool:
        return self.complete and bool(self.library_matcher.is_stopped())

    @property
    def failure(self) -> str:
        message = self.library_matcher.get_error() if self.library_matcher.is_error() else ""
        if not message or _NOTHING_FOLLOWS in message:
            return ""
        return plain(message) or UNKNOWN


@functools.cache
def _without_bit(bit: int) -> np.int32:
    return np.int32(~(1 << bit) if bit < 31 else 0x7FFFFFFF)
