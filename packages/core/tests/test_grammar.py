"""Constraints as plain data, and vocabularies."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.grammar import Constraint, GrammarSpec, Refusal, Vocabulary, refuse
from headrace_core.sampling.params import SamplingParams, StructuredOutputsParams


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"json": {}, "regex": "a"},
        {"choice": []},
        {"choice": "ab"},
        {"choice": ["a", 5]},
        {"regex": 5},
        {"grammar": " "},
        {"json": 5},
        {"structural_tag": []},
        {"regex": "a", "whitespace_pattern": 7},
        {"regex": "a", "enable_in_reasoning": "yes"},
    ],
)
def test_constraints_that_are_none(given):
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**given)
    assert caught.value.param.startswith("structured_outputs")


@pytest.mark.parametrize(
    "given",
    [{"json": {"a": [1]}}, {"json": "{}"}, {"json": {}}, {"json": True}, {"regex": ""},
     {"choice": [""]}, {"grammar": "root ::= x"}, {"json_object": True}, {"structural_tag": {}}],
)  # fmt: skip
def test_constraints_cross_processes_as_msgpack(given):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**given))
    frame = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.Decoder(SamplingParams).decode(frame) == params
    constraint = Constraint(GrammarSpec("guidance", "json", "{}"), (2, 7), "</think>", "<think>", 5)
    frame = msgspec.msgpack.encode(constraint)
    assert msgspec.msgpack.Decoder(Constraint).decode(frame) == constraint


def test_specs_are_keyed_by_content():
    one = GrammarSpec("guidance", "regex", "a")
    assert one.key == GrammarSpec("guidance", "regex", "a").key
    others = [
        GrammarSpec("xgrammar", "regex", "a"),
        GrammarSpec("guidance", "grammar", "a"),
        GrammarSpec("guidance", "regex", "a", any_whitespace=False),
        GrammarSpec("guidance", "regex", "a", whitespace_pattern=""),
    ]
    assert len({one.key, *(other.key for other in others)}) == 5


def test_refusals_say_keyword_place_and_param():
    reasons = [Refusal.of("not", f"/items/{i}", "unknown") for i in range(7)]
    error = refuse(GrammarSpec("guidance", "json", "{}"), reasons)
    assert isinstance(error, UnsupportedFeature)
    assert error.param == "structured_outputs.json"
    assert "'not' at '#/items/0': unknown" in str(error)
    assert "2 more" in str(error)


TOKENS = [*(bytes([i]) for i in range(256)), b"ab", b"abc", "é".encode(), b"<s>", b""]


@given(st.binary(max_size=30))
def test_every_text_has_a_spelling(text):
    vocabulary = Vocabulary(TOKENS, frozenset({259}))
    ids = vocabulary.spell(text)
    assert b"".join(TOKENS[i] for i in ids) == text
    assert 259 not in ids


def test_the_tokenizers_spelling_wins_if_it_is_one():
    right = Vocabulary(TOKENS, frozenset({259}), encode=lambda text: [97, 98, 99])
    assert right.spell(b"abc") == [97, 98, 99]
    assert right.spell(b"ab") == [256], "it spells something else"
    assert right.spell(b"\xff") == [255], "it cannot know parts of characters"
    with pytest.raises(ValueError, match="0x78"):
        Vocabulary([b"a"]).spell(b"ax")
