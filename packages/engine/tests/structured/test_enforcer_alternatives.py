"""What lm-format-enforcer's parser gets right of alternatives and lists goes to it, and no more."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from headrace_core.grammar import GrammarSpec, Vocabulary
from headrace_engine.structured.backends.lm_format_enforcer import EnforcerBackend

TOKENS = [bytes([i]) for i in range(256)] + [b'{"', b'": ', b'"}', b'", "', b"}]", b"},", b"[]"]
A = {"type": "object", "properties": {"a": {"enum": ["x", "xy"]}}, "required": ["a"],
     "additionalProperties": False}  # fmt: skip
B = {"type": "object", "required": ["b", "a"], "additionalProperties": False, "properties": {
    "a": {"type": "array", "items": {"enum": ["x", "z"]}, "maxItems": 2},
    "b": {"type": "boolean"}}}  # fmt: skip
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
LIST = {"type": "array", "items": {"anyOf": [A, B, EMPTY]}, "minItems": 1, "maxItems": 3}


def reasons(schema: Any) -> list[str]:
    return EnforcerBackend.refuse(GrammarSpec(EnforcerBackend.name, "json", json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "'anyOf' at '#'"),
        ({"anyOf": [A, {"type": "array", "items": A}]}, "'anyOf' at '#'"),
        ({"anyOf": [A, True]}, "'anyOf' at '#'"),
        ({"type": "array", "items": A, "minItems": 2}, "'minItems' at '#'"),
        ({"type": "array", "items": A, "maxItems": 0}, "'maxItems' at '#'"),
        ({"type": "object", "properties": {}}, "'required' at '#'"),
        ({"items": A}, "'type' at '#'"),
    ],
)
def test_what_its_parser_gets_wrong_is_refused(schema: Any, keyword: str) -> None:
    assert any(reason.startswith(keyword) for reason in map(str, reasons(schema)))


@pytest.mark.parametrize("schema", [LIST, EMPTY, {"anyOf": [A, B]}])
def test_random_texts_that_it_lets_pass_are_valid(schema: Any) -> None:
    pytest.importorskip(
        "lmformatenforcer", reason="pip install 'headrace-engine[lm-format-enforcer]'"
    )
    assert reasons(schema) == []
    vocabulary = Vocabulary(TOKENS)
    spec = GrammarSpec(EnforcerBackend.name, "json", json.dumps(schema))
    grammar = EnforcerBackend(vocabulary).compile(spec)
    mask = np.zeros((1, vocabulary.num_words), np.int32)
    for seed in range(8):
        chance, matcher, text = random.Random(seed), grammar.matcher(), b""
        for _ in range(400):
            matcher.fill_bitmask(mask, 0)
            free = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            if matcher.complete and (not free or chance.random() < 0.5):
                break
            assert free, f"nothing may follow {text!r}"
            taken = chance.choice([i for i in free if not TOKENS[i].isspace()] or free)
            assert matcher.advance([taken])
            text += TOKENS[taken]
        assert matcher.complete
        jsonschema.validate(json.loads(text), schema)
