"""Strict tools: whatever a model writes within a parser's form, that parser reads as valid calls."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from headrace_core import plugins
from headrace_core.errors import UnsupportedFeature
from headrace_core.grammar import Grammar, GrammarBackend, GrammarSpec, Vocabulary
from headrace_core.text import ToolCallParser
from headrace_engine.structured.backend_loading import backend_class

NAMES = sorted(plugins.installed("headrace.tool_parsers"))
REFUSED = {"gigachat3", "xlam"}
"""Calls of theirs begin like text."""
CLOSING = (
    "</parameter>", "</function>", "</tool_call>", "</arg_value>", "</｜DSML｜parameter>",
    "</steptml:parameter>", "</seed:tool_call>", "<escape>",
)  # fmt: skip
"""Marks that free values end with: random text would never find them."""
WORDS = ('{"', '": ', '"}', "</", "\n\n", "true", "<function=", "<parameter=", '"a"')
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"$ref": "#/$defs/Unit"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "exact": {"type": "boolean"},
        "short": {"type": "string", "minLength": 2, "maxLength": 4},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Unit": {"type": "string", "enum": ["C", "F"]}},
}
MORE: dict[str, Any] = {
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "flag": {"enum": ["on", "off", None]},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
}
PLAIN: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}


def load(name: str) -> type[ToolCallParser]:
    found: type[ToolCallParser] = plugins.load("headrace.tool_parsers", name)
    return found


def schema_for(name: str) -> dict[str, Any]:
    """FunctionGemma's format is held for scalars only."""
    if name == "functiongemma":
        return SCHEMA
    return {**SCHEMA, "properties": SCHEMA["properties"] | MORE}


def beginnings(name: str) -> list[str]:
    """How a model may begin a call of get_weather; walks at random go on from there."""
    marks: list[str] = list(load(name).opens)  # type: ignore[attr-defined]
    more = {
        "functiongemma": ["<start_function_call>call:get_weather{"],
        "openai": [
            "<|channel|>commentary to=functions.get_weather<|message|>",
            (
                "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.get_weather"
                "<|channel|>commentary <|constrain|>json<|message|>"
            ),
        ],
        "llama3_json": [*marks, "{", "\n{"],
        "llama4_json": [*marks, "{"],
        "pythonic": [*marks, "[", " ["],
        "llama4_pythonic": [*marks, "["],
    }
    found = more.get(name, marks)
    return [*found, *("Hi. " + begin for begin in found if begin.strip() not in ("{", "["))]


@functools.cache
def vocabulary(*, special: bool) -> Vocabulary:
    """Bytes and some words; the marks are special tokens, or plain text."""
    words = [bytes([i]) for i in range(256)] + [word.encode() for word in WORDS + CLOSING]
    marks: list[str] = []
    if special:
        for name in NAMES:
            found = [*load(name).opens, *load(name).closes]  # type: ignore[attr-defined]
            marks += [m for m in found if m.startswith(("<|", "<｜", "[TOOL", "<tool_"))]
        marks += ["<|message|>", "<|constrain|>", "[ARGS]"]
    tokens = words + [mark.encode() for mark in dict.fromkeys(marks)]
    return Vocabulary(tokens, frozenset(range(len(words), len(tokens))))


@functools.cache
def backend(name: str, special: bool) -> GrammarBackend:
    found = backend_class(name)
    pytest.importorskip(found.library)
    return found(vocabulary(special=special))


def compiled(which: GrammarBackend, form: Any) -> Grammar:
    tag = json.dumps({"type": "structural_tag", "format": form})
    spec = GrammarSpec(which.name, "structural_tag", tag)
    assert which.refuse(spec) == []
    return which.compile(spec)


def spell(text: str, words: Vocabulary) -> list[int]:
    """Special tokens for their names, bytes for the rest."""
    ids: list[int] = []
    names = sorted(words.special_ids, key=len, reverse=True)
    while text:
        name = next((name for name in names if text.startswith(name)), None)
        ids += [words.special_ids[name]] if name else text[0].encode()
        text = text.removeprefix(name) if name else text[1:]
    return ids


def walk(grammar: Grammar, words: Vocabulary, begin: str, seed: int) -> tuple[str, bool]:
    """A random text that the grammar admits, and whether it came to an end."""
    chance, matcher = random.Random(seed), grammar.matcher()
    ids = spell(begin, words)
    assert matcher.advance(ids), f"{begin!r} is no beginning"
    mask = np.zeros((1, words.num_words), np.int32)
    for step in range(300):
        matcher.fill_bitmask(mask, 0)
        free = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = [i for i in map(int, free) if i > 127 or i == 10 or 32 <= i < 127]
        if matcher.complete and (not allowed or step > 150 or chance.random() < 0.15):
            return b"".join(words.tokens[i] for i in ids).decode("utf-8", "replace"), True
        assert len(free), "a dead end"
        tokens = {i: words.tokens[i].decode("utf-8", "replace") for i in allowed}
        ends = [i for i, token in tokens.items() if token in CLOSING]
        marks = [i for i, token in tokens.items() if token[:1] in '"}])>\n<']
        choice = allowed or [int(i) for i in free]
        if ends and chance.random() < 0.4:
            choice = ends
        elif marks and chance.random() < 0.5:
            choice = marks
        ids.append(chance.choice(choice))
        assert matcher.advance(ids[-1:])
    return b"".join(words.tokens[i] for i in ids).decode("utf-8", "replace"), False


def check(parser: ToolCallParser, text: str, schema: Any, *, ended: bool) -> int:
    """The number of calls that the parser finds and that are held to the schema."""
    num_calls = 0
    for call in parser.parse(text)[1]:
        if call.name == "get_weather":
            try:
                arguments = json.loads(call.arguments)
            except ValueError:
                assert not ended, f"{text!r}: {call.arguments!r}"
                continue
            jsonschema.validate(arguments, schema)
            num_calls += 1
    return num_calls


@pytest.mark.keep(12, every_value=False)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_what_the_form_admits_is_read_as_valid_calls(name: str, special: bool) -> None:
    schema = schema_for(name)
    which, words = backend("guidance", special), vocabulary(special=special)
    grammar = compiled(
        which, load(name).strict_structural_tag({"get_weather": schema, "other": None})
    )
    tools = [{"function": {"name": "get_weather", "parameters": schema}}]
    found = 0
    for begin in beginnings(name):
        for seed in range(8):
            text, ended = walk(grammar, words, begin, seed)
            found += check(load(name)(tools), text, schema, ended=ended)
    assert found >= 3


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_xgrammar_takes_the_forms(name: str) -> None:
    if name in ("llama3_json", "llama4_json", "openai"):
        pytest.skip("its answers end within a tag, which xgrammar refuses by name")
    which, words = backend("xgrammar", False), vocabulary(special=False)
    grammar = compiled(
        which, load(name).strict_structural_tag({"get_weather": PLAIN, "other": None})
    )
    tools = [{"function": {"name": "get_weather", "parameters": PLAIN}}]
    for begin in beginnings(name):
        text, ended = walk(grammar, words, begin, 1)
        check(load(name)(tools), text, PLAIN, ended=ended)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_other_text_stays_free(name: str) -> None:
    words = vocabulary(special=False)
    form = load(name).strict_structural_tag({"get_weather": PLAIN})
    grammar = compiled(backend("guidance", False), form)
    for text in ("", "Hello.\n", "a < b <b>x</b> {x} [y]", "<p>(1)", "<", "\n\nSo [1] {a}"):
        matcher = grammar.matcher()
        assert matcher.advance(spell(text, words)), text
        assert matcher.complete, text


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_formats_that_cannot_be_held_have_no_form(name: str) -> None:
    assert load(name).strict_structural_tag({"f": PLAIN}) is None
    assert load(name).call_delimiters("f") is None


@pytest.mark.parametrize(
    ("name", "schema", "what"),
    [
        ("qwen3_xml", {"type": "object", "anyOf": [{"required": ["a"]}]}, "anyOf"),
        ("glm45", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern"),
        ("minimax_m2", {"properties": {"a": {"$ref": "#/properties/b"}}}, "$ref"),
        ("step3", {"properties": {}, "required": ["a"]}, "required"),
        ("seed_oss", {"properties": {"a>b": {}}}, "name"),
        ("qwen3_xml", {"properties": {"a": {"enum": ["</parameter>"]}}}, "value"),
        ("pythonic", {"properties": {"a-b": {}}}, "name"),
        ("functiongemma", {"properties": {"a": {"type": "array"}}}, "numbers"),
    ],
)
def test_schemas_that_a_format_cannot_be_held_to(name: str, schema: Any, what: str) -> None:
    with pytest.raises(UnsupportedFeature, match="strict") as error:
        load(name).strict_structural_tag({"f": schema})
    assert what in str(error.value)
    assert error.value.param == "tools"
