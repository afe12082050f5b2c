"""Conformance suite of grammar backends. Inherit, and say which.

class TestMine(GrammarConformance):
    backend = MyBackend
    kinds = frozenset({"json", "regex", "choice"})
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from headrace_core.errors import RequestError
from headrace_core.grammar import Grammar, GrammarBackend, GrammarMatcher, GrammarSpec, Vocabulary

BYTES = [bytes([i]) for i in range(256)]
WORDS = [b'{"', b'":', b"ab", b"abc", b", ", b"12", "é".encode(), b"true", b" world", b'"}', b"]}"]
SPECIAL = [b"<|end|>", b"<think>"]

REGEX = "a(b|cd)*e?"
CHOICES = ["yes", "no", "yes, but", "naïve é", 'quote " and \\ and [x] (y)']
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
EBNF = 'root ::= "(" inner ")"\ninner ::= root inner | ""'


def byte_vocabulary() -> Vocabulary:
    """One token for each byte, and special ones: every text has one spelling."""
    return Vocabulary(BYTES + SPECIAL, frozenset({256, 257}))


def word_vocabulary() -> Vocabulary:
    """Bytes and some words, also with equal bytes, with holes and special tokens in between."""
    tokens = BYTES + SPECIAL + WORDS + [b"", b"ab", b""]
    return Vocabulary(tokens, frozenset({256, 257}))


def allowed(matcher: GrammarMatcher, vocabulary: Vocabulary) -> list[int]:
    """Tokens that may be next."""
    words = np.full((1, vocabulary.num_words), 0x55555555, np.int32)
    matcher.fill_bitmask(words, 0)
    return bits(words[0])


def bits(words: npt.NDArray[np.int32]) -> list[int]:
    """Numbers of the bits that are set."""
    found: list[int] = np.flatnonzero(
        np.unpackbits(words.view(np.uint8), bitorder="little")
    ).tolist()
    return found


def complete(matcher: GrammarMatcher) -> bool:
    """Its property, asked anew: type checkers take a property for a constant."""
    return matcher.complete


def terminated(matcher: GrammarMatcher) -> bool:
    """Likewise."""
    return matcher.terminated


def walk(
    grammar: Grammar, vocabulary: Vocabulary, seed: int, most: int = 200, structural: float = 0.5
) -> bytes | None:
    """A random sentence of a grammar; None if it did not end in time.

    Args:
        grammar: compiled for the vocabulary.
        vocabulary: its tokens.
        seed: of the choices.
        most: tokens.
        structural: how often marks that end things are preferred, so that sentences stay short.
    """
    chosen, matcher, text = random.Random(seed), grammar.matcher(), b""
    for _ in range(most):
        tokens = allowed(matcher, vocabulary)
        if matcher.complete and (not tokens or chosen.random() < 0.3):
            return text
        assert tokens, f"nothing may follow {text!r}"
        marks = [t for t in tokens if vocabulary.tokens[t][:1] in b'"}],:{[01eE']
        token = chosen.choice(marks if marks and chosen.random() < structural else tokens)
        assert matcher.advance([token]), (text, vocabulary.tokens[token])
        text += vocabulary.tokens[token]
    return None


@functools.cache
def _made(backend: type[GrammarBackend], vocabulary: Callable[[], Vocabulary]) -> GrammarBackend:
    return backend(vocabulary())


class GrammarConformance:
    """The suite. Class attributes say which backend, and what it serves."""

    backend: ClassVar[type[GrammarBackend]]
    kinds: ClassVar[frozenset[str]] = frozenset(
        {"json", "json_object", "regex", "choice", "grammar", "structural_tag"}
    )
    """Kinds of constraint that it serves."""
    goes_on: ClassVar[bool] = True
    """True if a text that is complete may become one that is not."""
    whole_characters: ClassVar[bool] = False
    """True if it knows nothing of tokens that are parts of characters."""

    @pytest.fixture
    def by_bytes(self) -> GrammarBackend:
        return _made(self.backend, byte_vocabulary)

    @pytest.fixture
    def by_words(self) -> GrammarBackend:
        return _made(self.backend, word_vocabulary)

    def spec(self, kind: str, source: str) -> GrammarSpec:
        if kind not in self.kinds:
            pytest.skip(f"{self.backend.name} does not serve {kind}")
        return GrammarSpec(self.backend.name, kind, source)

    def compiled(self, backend: GrammarBackend, kind: str, source: str) -> Grammar:
        spec = self.spec(kind, source)
        assert backend.refuse(spec) == []
        return backend.compile(spec)

    @pytest.mark.parametrize(
        ("kind", "source"),
        [("regex", REGEX), ("choice", json.dumps(CHOICES[1:3])), ("json", json.dumps(SCHEMA))],
    )
    def test_masks_agree_with_advance(
        self, by_bytes: GrammarBackend, kind: str, source: str
    ) -> None:
        vocabulary, chosen = by_bytes.vocabulary, random.Random(1)
        matcher = self.compiled(by_bytes, kind, source).matcher()
        for _ in range(30):
            tokens = allowed(matcher, vocabulary)
            for token in range(vocabulary.size):
                taken = matcher.advance([token])
                assert taken == (token in tokens), (token, tokens)
                if taken:
                    matcher.roll_back(1)
            if not tokens:
                break
            assert matcher.advance([chosen.choice(tokens)])

    def test_masks_of_longer_tokens_agree_too(self, by_words: GrammarBackend) -> None:
        vocabulary, chosen = by_words.vocabulary, random.Random(2)
        matcher = self.compiled(by_words, "regex", "(abc|ab|[0-9]| world)*").matcher()
        for _ in range(30):
            tokens = allowed(matcher, vocabulary)
            texts = {vocabulary.tokens[token] for token in tokens}
            assert {b"ab", b"abc", b"12", b" world"} <= texts or texts <= {b"c", b"b", *BYTES}
            token = chosen.choice(tokens)
            assert matcher.advance([token])

    def test_complete_is_when_the_whole_text_matches(self, by_words: GrammarBackend) -> None:
        vocabulary = by_words.vocabulary
        grammar = self.compiled(by_words, "regex", REGEX)
        for seed in range(20):
            chosen, matcher, text = random.Random(seed), grammar.matcher(), b""
            for _ in range(12):
                assert complete(matcher) == bool(re.fullmatch(REGEX, text.decode()))
                tokens = allowed(matcher, vocabulary)
                assert terminated(matcher) == (complete(matcher) and not tokens)
                if not tokens:
                    break
                token = chosen.choice(tokens)
                assert matcher.advance([token])
                text += vocabulary.tokens[token]

    def test_terminated_when_nothing_may_follow(self, by_bytes: GrammarBackend) -> None:
        matcher = self.compiled(by_bytes, "regex", "ab?").matcher()
        assert not complete(matcher)
        assert matcher.advance(b"a")
        assert complete(matcher)
        assert not terminated(matcher)
        assert matcher.advance(b"b")
        assert terminated(matcher)
        assert allowed(matcher, by_bytes.vocabulary) == []
        assert not matcher.advance(b"b")
        matcher.roll_back(1)
        assert complete(matcher)
        assert not terminated(matcher)

    def test_what_is_refused_leaves_no_trace(self, by_bytes: GrammarBackend) -> None:
        matcher = self.compiled(by_bytes, "regex", "abc").matcher()
        assert not matcher.advance(b"abx")
        assert not matcher.advance([257])
        assert not matcher.advance([100_000])
        assert allowed(matcher, by_bytes.vocabulary) == [ord("a")]
        assert matcher.advance(b"abc")
        assert complete(matcher)

    def test_roll_back_restores(self, by_words: GrammarBackend) -> None:
        vocabulary, chosen = by_words.vocabulary, random.Random(3)
        matcher = self.compiled(by_words, "json", json.dumps(SCHEMA)).matcher()
        seen = [(allowed(matcher, vocabulary), complete(matcher))]
        for _ in range(200):
            if len(seen) > 1 and chosen.random() < 0.4:
                count = chosen.randint(1, len(seen) - 1)
                matcher.roll_back(count)
                del seen[-count:]
                assert (allowed(matcher, vocabulary), complete(matcher)) == seen[-1]
            elif seen[-1][0]:
                assert matcher.advance([chosen.choice(seen[-1][0])])
                seen.append((allowed(matcher, vocabulary), complete(matcher)))

    def test_only_its_own_row_is_written(self, by_bytes: GrammarBackend) -> None:
        matcher = self.compiled(by_bytes, "regex", REGEX).matcher()
        for before in (0, -1, 0x2AAAAAAA):
            words = np.full((3, by_bytes.vocabulary.num_words), before, np.int32)
            matcher.fill_bitmask(words, 1)
            assert (words[[0, 2]] == before).all()
            assert bits(words[1]) == [ord("a")]

    def test_several_rows_at_once_equal_one_by_one(self, by_words: GrammarBackend) -> None:
        grammar = self.compiled(by_words, "json", json.dumps(SCHEMA))
        matchers = [grammar.matcher() for _ in range(5)]
        for count, matcher in enumerate(matchers):
            assert matcher.advance(list(b'{"name'[:count]))
        alone = np.zeros((7, by_words.vocabulary.num_words), np.int32)
        for row, matcher in enumerate(matchers):
            matcher.fill_bitmask(alone, row + 1)
        together = np.zeros_like(alone)
        by_words.fill_bitmasks([(m, row + 1) for row, m in enumerate(matchers)], together)
        assert (alone == together).all()

    def test_matchers_of_one_grammar_are_independent(self, by_bytes: GrammarBackend) -> None:
        grammar = self.compiled(by_bytes, "regex", "a[bc]*d")
        one, other = grammar.matcher(), grammar.matcher()
        assert one.advance(b"abb")
        assert allowed(other, by_bytes.vocabulary) == [ord("a")]
        assert other.advance(b"acd")
        assert one.advance(b"c")
        late = grammar.matcher()
        assert allowed(late, by_bytes.vocabulary) == [ord("a")]

    def test_special_tokens_are_no_text(self, by_bytes: GrammarBackend) -> None:
        matcher = self.compiled(by_bytes, "regex", "[^x]*").matcher()
        tokens = allowed(matcher, by_bytes.vocabulary)
        assert ord("<") in tokens
        assert not {256, 257} & set(tokens)

    def test_a_character_of_several_bytes(self, by_bytes: GrammarBackend) -> None:
        if self.whole_characters:
            pytest.skip(f"{self.backend.name} knows whole characters only")
        matcher = self.compiled(by_bytes, "regex", "[à-ü]").matcher()
        assert allowed(matcher, by_bytes.vocabulary) == ["é".encode()[0]]
        assert matcher.advance("é".encode()[:1])
        assert not complete(matcher)
        assert matcher.advance("é".encode()[1:])
        assert complete(matcher)

    def test_choices_are_taken_letter_by_letter(self, by_words: GrammarBackend) -> None:
        choices = [c for c in CHOICES if c.isascii() or not self.whole_characters]
        choices = choices if self.goes_on else choices[1:]  # the first begins another
        grammar = self.compiled(by_words, "choice", json.dumps(choices))
        for text in choices:
            matcher = grammar.matcher()
            assert matcher.advance(list(text.encode())), text
            assert complete(matcher)
        found = {walk(grammar, by_words.vocabulary, seed, structural=0) for seed in range(30)}
        assert found <= {text.encode() for text in CHOICES}
        assert len(found) > 2

    def test_sentences_are_json_of_the_schema(self, by_words: GrammarBackend) -> None:
        grammar = self.compiled(by_words, "json", json.dumps(SCHEMA))
        done = 0
        for seed in range(30):
            text = walk(grammar, by_words.vocabulary, seed)
            if text is None:
                continue
            done += 1
            value = json.loads(text)
            assert set(value) == {"name", "tags"}
            assert isinstance(value["name"], str)
            assert set(value["tags"]) <= {"a", "b"}
        assert done > 10

    def test_white_space_comes_to_an_end(self, by_bytes: GrammarBackend) -> None:
        matcher = self.compiled(by_bytes, "json", json.dumps(SCHEMA)).matcher()
        assert matcher.advance(b"{")
        count = 0
        while matcher.advance(b" "):
            count += 1
            assert count < 100
        assert matcher.advance(b'"name"')

    def test_any_object(self, by_words: GrammarBackend) -> None:
        grammar = self.compiled(by_words, "json_object", "")
        texts = [walk(grammar, by_words.vocabulary, seed, structural=0.8) for seed in range(30)]
        found = [json.loads(text) for text in texts if text is not None]
        assert len(found) > 5
        assert all(isinstance(value, dict) for value in found)

    def test_a_grammar_that_counts(self, by_words: GrammarBackend) -> None:
        grammar = self.compiled(by_words, "grammar", EBNF)
        matcher = grammar.matcher()
        assert matcher.advance(b"(()(()))")
        assert terminated(matcher)
        matcher = grammar.matcher()
        assert matcher.advance(b"(()")
        assert not complete(matcher)
        assert set(allowed(matcher, by_words.vocabulary)) == {ord("("), ord(")")}

    def test_structural_tags_constrain_between_marks_only(self, by_words: GrammarBackend) -> None:
        tag = {
            "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
            "triggers": ["<f="],
        }
        matcher = self.compiled(by_words, "structural_tag", json.dumps(tag)).matcher()
        assert matcher.advance(b"free text, < f and ")
        assert complete(matcher)
        assert matcher.advance(b"<f=")
        assert not complete(matcher)
        assert not matcher.advance(b"b")
        assert matcher.advance(b'a>{"name": "x"')
        assert not matcher.advance(b"}")
        assert matcher.advance(b', "tags": []}</f>')
        assert complete(matcher)
        assert matcher.advance(b" and on")

    @pytest.mark.parametrize(("kind", "source"), [("regex", "(a"), ("grammar", 'root ::= "a" (')])
    def test_what_is_malformed_is_a_request_error(
        self, by_bytes: GrammarBackend, kind: str, source: str
    ) -> None:
        with pytest.raises(RequestError) as caught:
            by_bytes.compile(self.spec(kind, source))
        assert caught.value.param == f"structured_outputs.{kind}"
        assert "0x" not in str(caught.value)
        assert "/python" not in str(caught.value)

    def test_refusals_name_keyword_and_pointer(self) -> None:
        inner = {"type": "object", "properties": {"deep": {"not": {"type": "string"}}}}
        schema = {"type": "object", "properties": {"a~/b": inner}}
        reasons = self.backend.refuse(self.spec("json", json.dumps(schema)))
        assert any("'not'" in r and "'#/properties/a~0~1b/properties/deep'" in r for r in reasons)
