"""Structural tags as Lark: both forms, every type, special tokens as marks."""

import json

import pytest

from headrace_core.errors import RequestError
from headrace_core.grammar import GrammarSpec, Vocabulary, refuse
from headrace_core.sampling.params import StructuredOutputsParams
from headrace_engine.config import StructuredOutputsConfig
from headrace_engine.structured.backends.guidance import GuidanceBackend
from headrace_engine.structured.source import source_of
from headrace_testing.engine.grammars import BYTES, allowed

TOKENS = [*BYTES, b"</s>", b"<call>", b"</call>"]
VOCABULARY = Vocabulary(TOKENS, frozenset({256, 257, 258}))
CONST = {"type": "const_string", "value": "A:"}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 9}}
TEXT = {"type": "any_text"}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


@pytest.fixture(scope="module")
def backend():
    return GuidanceBackend(VOCABULARY)


def sentence(backend, form, tokens):
    """None: not even a beginning of one; else whether it is complete."""
    spec = GrammarSpec("guidance", "structural_tag", json.dumps({"format": form}))
    assert backend.refuse(spec) == []
    matcher = backend.compile(spec).matcher()
    return matcher.complete if matcher.advance(list(tokens)) else None


@pytest.mark.parametrize(
    ("form", "whole", "beginnings", "wrong"),
    [
        (CONST, ["A:"], ["A"], ["B", "A:x"]),
        (NUMBER, ["7"], [""], ["x", "77"]),
        ({"type": "regex", "pattern": "a/b\n[0-9]"}, ["a/b\n1"], ["a/"], ["a1"]),
        ({"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}, ["((x))"], ["(x"], [")"]),
        (TEXT, ["", "anything <call"], [], []),
        ({"type": "sequence", "elements": [CONST, NUMBER]}, ["A:3"], ["A:"], ["3"]),
        ({"type": "sequence", "elements": [TEXT, CONST, NUMBER]}, ["so A:3"], ["so A:"], ["A:x"]),
        ({"type": "or", "elements": [CONST, NUMBER]}, ["A:", "5"], ["A"], ["A:5"]),
        (tag("<n>", NUMBER, "</n>"), ["<n>4</n>"], ["<n>4"], ["4", "<n>x"]),
        (tag("<n>", NUMBER, ["!", "?"]), ["<n>4!", "<n>4?"], ["<n>4"], ["<n>4."]),
        (tag("<t>", TEXT, "</t>"), ["<t>x < y</t>"], ["<t>x </"], ["<t></t>x"]),
        (
            {"type": "triggered_tags", "triggers": ["<f"],
             "tags": [tag("<f1>", NUMBER, ";"), tag("<f2>", CONST, ";")]},
            ["", "free", "a<f1>3;b<f2>A:;"], ["<f1>", "<f", "<f2>A"], ["<f3", "<f1>A", "<f1>3.", ],
        ),
        (
            {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag("<f1>", NUMBER, ";")],
             "at_least_one": True, "stop_after_first": True},
            ["so <f1>3;"], ["", "so"], ["<f1>3;x"],
        ),
        (
            {"type": "tags_with_separator", "separator": ",", "tags": [tag("[", NUMBER, "]")],
             "at_least_one": True},
            ["[1]", "[1],[2]"], ["", "[1],"], ["[1][2]"],
        ),
        ({"type": "repeat", "min": 1, "max": 3, "content": NUMBER},
         ["1", "12", "123"], [""], ["1234", "x"]),
        ({"type": "repeat", "min": 0, "max": 1, "content": tag("<", NUMBER, ">")},
         ["", "<1>"], ["<"], ["<1><2>"]),
        ({"type": "repeat", "min": 2, "max": -1, "content": NUMBER},
         ["12", "1" * 50], ["", "1"], ["x"]),
    ],
)  # fmt: skip
def test_every_type(backend, form, whole, beginnings, wrong):
    assert {text: sentence(backend, form, text.encode()) for text in whole} == dict.fromkeys(
        whole, True
    )
    assert {t: sentence(backend, form, t.encode()) for t in beginnings} == dict.fromkeys(
        beginnings, False
    )
    assert {t: sentence(backend, form, t.encode()) for t in wrong} == dict.fromkeys(wrong)


def test_marks_that_are_special_tokens_are_matched_as_tokens(backend):
    form = {"type": "triggered_tags", "triggers": ["<call>"],
            "tags": [tag("<call>", NUMBER, "</call>")]}  # fmt: skip
    assert sentence(backend, form, [*b"so ", 257, ord("3"), 258]) is True
    assert sentence(backend, form, [*b"so ", 257, ord("x")]) is None
    spec = GrammarSpec("guidance", "structural_tag", json.dumps({"format": form}))
    matcher = backend.compile(spec).matcher()
    assert {257} == {256, 257, 258} & set(allowed(matcher, VOCABULARY))


@pytest.mark.parametrize(
    ("form", "place"),
    [
        ({"type": "tag", "begin": "a"}, "'content' at '#/format'"),
        ({"type": "sequence", "elements": []}, "'elements' at '#/format'"),
        ({"type": "sequence", "elements": [5]}, "'#/format/elements/0'"),
        (tag(5, TEXT, ""), "'begin' at '#/format'"),
        ({"type": "triggered_tags", "triggers": ["x"], "tags": [tag("a", TEXT, "")]}, "'begin'"),
        ({"type": "repeat", "min": 0, "max": 2}, "'content' at '#/format'"),
        ({"type": "repeat", "min": 0, "max": 2, "content": 5}, "'#/format/content'"),
        ({"type": "repeat", "min": "0", "max": 2, "content": TEXT}, "'min' at '#/format'"),
        ({"type": "repeat", "min": 0, "max": 10**9, "content": TEXT}, "'max' at '#/format'"),
        ({"type": "repeat", "min": 3, "max": 2, "content": TEXT}, "'max' at '#/format'"),
        ({"type": "repeat", "min": 0, "max": 0, "content": TEXT}, "'max' at '#/format'"),
    ],
)
def test_malformed_tags_are_named_with_their_place(backend, form, place):
    spec = GrammarSpec("guidance", "structural_tag", json.dumps({"format": form}))
    with pytest.raises(RequestError, match=place):
        backend.refuse(spec)


def test_what_has_no_counterpart_is_refused(backend):
    def reasons(form):
        spec = GrammarSpec("guidance", "structural_tag", json.dumps({"format": form}))
        return backend.refuse(spec)

    assert "'token' at '#/format'" in reasons({"type": "token", "token": 5})[0]
    assert "'max_tokens'" in reasons({"type": "any_text", "max_tokens": 5})[0]
    assert "'style'" in reasons({**NUMBER, "style": "qwen_xml"})[0]
    assert "any_text" in reasons({"type": "sequence", "elements": [TEXT, NUMBER]})[0]
    assert "'not'" in reasons({"type": "json_schema", "json_schema": {"not": {}}})[0]


def checked(tag):
    """Take a tag as far as a request's goes."""
    spec = source_of(StructuredOutputsParams(structural_tag=tag), StructuredOutputsConfig()).spec(
        "guidance"
    )
    reasons = GuidanceBackend.refuse(spec)
    if reasons:
        raise refuse(spec, reasons)
    GuidanceBackend(Vocabulary([bytes([byte]) for byte in range(256)])).compile(spec)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a": {"not": {}}}}, "'not' at '#{}/properties/a'"),
        ({"properties": {"a": {"type": "text"}}}, "'type' at '#{}/properties/a'"),
        ({"properties": {"a": 5}}, "5 at '#{}/properties/a' is not a schema"),
        ({"$ref": "#/$defs/a"}, "'$ref' at '#{}': '#/$defs/a' leads nowhere"),
        (
            {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
            "'pattern' at '#{}/properties/a'",
        ),
        ({"allOf": [{"type": "string", "minLength": 3, "maxLength": 1}]}, "at '#{}"),
    ],
)  # fmt: skip
def test_places_of_errors_are_places_in_the_tag(schema, said):
    """With several schemas in a tag, a place in one of them says nothing."""
    fine = {"type": "json_schema", "json_schema": {"type": "integer"}}
    form = {"type": "sequence", "elements": [fine, {"type": "json_schema", "json_schema": schema}]}
    structures = [
        {"begin": "<a>", "schema": {"type": "integer"}, "end": ""},
        {"begin": "<b>", "schema": schema, "end": ""},
    ]
    for tag, place in (
        ({"format": form}, "/format/elements/1/json_schema"),
        ({"structures": structures, "triggers": ["<"]}, "/structures/1/schema"),
    ):
        with pytest.raises(RequestError) as caught:
            checked(tag)
        assert said.format(place) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"type": "regex", "pattern": "(a"}, "'pattern' at '#{}': unclosed group"),
        ({"type": "regex", "pattern": "a\\"}, "a regex at '#{}/pattern' ends with a backslash"),
        (
            {"type": "grammar", "grammar": "root ::= x"},
            "'grammar' at '#{}': line 1 column 10: there",
        ),
        (
            {"type": "grammar", "grammar": "start: x"},
            "'grammar' at '#{}': line 1 column 8: unknown name",
        ),
    ],
)
def test_a_regex_or_grammar_that_is_refused_is_named_with_its_place(content, said):
    tags = [tag("<a>", {"type": "regex", "pattern": "a"}, "</a>"), tag("<b>", content, "</b>")]
    form = {"type": "triggered_tags", "triggers": ["<"], "tags": tags}
    with pytest.raises(RequestError) as caught:
        checked({"format": form})
    assert said.format("/format/tags/1/content") in str(caught.value)
    assert caught.value.param == "structured_outputs.structural_tag"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"begin": 5}, "'begin' at '#/structures/1': must be text"),
        ({"end": 5}, "'end' at '#/structures/1': must be text"),
        (
            {"begin": "b"},
            "'begin' at '#/structures/1': 'b' must begin with one of the triggers ['<']",
        ),
    ],
)
def test_errors_in_the_older_form_speak_of_the_older_form(wrong, said):
    fine = {"begin": "<a>", "schema": {}, "end": ""}
    with pytest.raises(RequestError) as caught:
        checked({"structures": [fine, {**fine, **wrong}], "triggers": ["<"]})
    assert said in str(caught.value)
    with pytest.raises(RequestError, match="'triggers' at '#': must be a list of texts"):
        checked({"structures": [fine], "triggers": [5]})


def test_regexes_and_grammars_in_tags_mean_the_same_with_xgrammar():
    pytest.importorskip("xgrammar")
    from headrace_engine.structured.backends.xgrammar import XGrammarBackend

    form = {
        "type": "sequence",
        "elements": [
            {"type": "regex", "pattern": "a.b"},
            {"type": "grammar", "grammar": 'root ::=\n ("(" root ")")?'},
        ],
    }
    for made in (GuidanceBackend(VOCABULARY), XGrammarBackend(VOCABULARY)):
        spec = GrammarSpec(made.name, "structural_tag", json.dumps({"format": form}))
        assert made.refuse(spec) == []
        for text, whole in (("axb(())", True), ("axb", True), ("axb(", False), ("a\nb", None)):
            matcher = made.compile(spec).matcher()
            found = matcher.complete if matcher.advance(list(text.encode())) else None
            assert found is whole, (made.name, text)
    tags = [tag("<a>", {"type": "regex", "pattern": r"\d"}, "</a>")]
    older = {"format": {"type": "triggered_tags", "triggers": ["<"], "tags": tags}}
    spec = GrammarSpec("xgrammar", "structural_tag", json.dumps(older))
    assert "'pattern' at '#/format/tags/0/content': character 1" in XGrammarBackend.refuse(spec)[0]
    bad = {
        "format": {
            "type": "sequence",
            "elements": [CONST, {"type": "grammar", "grammar": "root ::= x"}],
        }
    }
    with pytest.raises(RequestError, match="'grammar' at '#/format/elements/1': line 1 column 10"):
        XGrammarBackend(VOCABULARY).compile(
            GrammarSpec("xgrammar", "structural_tag", json.dumps(bad))
        )
