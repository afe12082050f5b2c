"""Constraints as plain data, and vocabularies."""

from __future__ import annotations

import msgspec
import pytest

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.grammar import Constraint, GrammarSpec, Refusal, refuse
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
