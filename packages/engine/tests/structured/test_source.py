"""Limits that are checked before anything is compiled."""

import json

import pytest

from headrace_core.errors import RequestError
from headrace_core.sampling.params import StructuredOutputsParams
from headrace_engine.config import StructuredOutputsConfig
from headrace_engine.structured.backend_loading import backend_class
from headrace_engine.structured.source import source_of

CONFIG = StructuredOutputsConfig(max_source_bytes=10_000, max_depth=8, max_regex_length=50)


def nested(levels, value=None):
    found = {} if value is None else value
    for _ in range(levels):
        found = {"type": "array", "items": found}
    return found


@pytest.mark.req("SEC-14")
@pytest.mark.parametrize(
    "given",
    [
        {"json": {"enum": ["x" * 11_000]}},
        {"json": '"' + "x" * 11_000 + '"'},
        {"json": nested(20)},
        {"json": "[" * 5_000},
        {"json": '{"a": ' * 1_500},
        {"json": {"pattern": "a" * 51}},
        {"json": {"patternProperties": {"a" * 51: {}}}},
        {"json": {"properties": {"x": {"items": {"pattern": "a" * 51}}}}},
        {"json": {"enum": [float("nan")]}},
        {"json": {"enum": [{1, 2}]}},
        {"json": "{"},
        {"json": "nul"},
        {"json": True, "whitespace_pattern": "a" * 51},
        {"regex": "a" * 51},
        {"regex": "\ud800"},
        {"grammar": 'root ::= "' + "a" * 11_000 + '"'},
        {"choice": ["a" * 11_000]},
        {"choice": [str(i) for i in range(11_000)]},
        {"structural_tag": {"format": nested(30)}},
        {"structural_tag": {"structures": [{"begin": "a", "end": "b", "schema": {"type": 5}}],
                            "triggers": ["a"]}},
        {"structural_tag": "[]]"},
    ],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
@pytest.mark.timeout(60)  # refused without a closer look, which takes far longer
def test_too_large_too_deep_or_no_json(given):
    with pytest.raises(RequestError) as caught:
        source_of(StructuredOutputsParams(**given), CONFIG)
    assert caught.value.param.startswith("structured_outputs.")
    assert len(str(caught.value)) < 500


def test_the_same_schema_in_any_form_is_one_source():
    as_text = StructuredOutputsParams(json='{"type" : "integer", "format":"int32"}')
    as_object = StructuredOutputsParams(json={"type": "integer"})
    assert source_of(as_text, CONFIG) == source_of(as_object, CONFIG)
    assert (
        source_of(as_text, CONFIG).spec("guidance").key
        != source_of(as_text, CONFIG).spec("xgrammar").key
    )


def test_options_of_a_request_and_of_the_operator():
    compact = StructuredOutputsConfig(backend="guidance", disable_any_whitespace=True,
                                      disable_additional_properties=True)  # fmt: skip
    schema = {"properties": {"a": {}}}
    source = source_of(StructuredOutputsParams(json=schema), compact)
    assert not source.any_whitespace
    assert '"additionalProperties": false' in source.text
    with pytest.raises(RequestError, match="whitespace_pattern"):
        source_of(StructuredOutputsParams(json=schema, whitespace_pattern="[ ]?"), compact)


def test_schemas_in_tags_are_treated_as_others_are():
    """Keywords that say nothing are dropped, and objects closed where the operator closes them."""
    idle = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": False}}}
    closed = StructuredOutputsConfig(backend="guidance", disable_additional_properties=True)
    for config, more in ((CONFIG, {}), (closed, {"additionalProperties": False})):
        plain = {"type": "object", "properties": {"a": {"type": "array"}}, **more}
        form = {"type": "tag", "begin": "x", "end": "y",
                "content": {"type": "json_schema", "json_schema": idle}}  # fmt: skip
        older = {"structures": [{"begin": "x", "end": "y", "schema": idle}], "triggers": ["x"]}
        found = source_of(StructuredOutputsParams(structural_tag={"format": form}), config)
        assert json.loads(found.text)["format"]["content"]["json_schema"] == plain
        found = source_of(StructuredOutputsParams(structural_tag=older), config)
        assert json.loads(found.text)["structures"][0]["schema"] == plain


@pytest.mark.parametrize(
    "more", [{"name": "n"}, {"name": "n", "strict": True}, {}, {"description": "d"}]
)
@pytest.mark.parametrize("as_text", [False, True])
def test_a_schema_in_openais_wrapper_is_the_schema(more, as_text):
    """As a schema the wrapper would say nothing, and any answer would do."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wrapped = {**more, "schema": schema}
    given = json.dumps(wrapped) if as_text else wrapped
    config = StructuredOutputsConfig()
    assert json.loads(source_of(StructuredOutputsParams(json=given), config).text) == schema
    tag = {"format": {"type": "json_schema", "json_schema": wrapped}}
    text = source_of(StructuredOutputsParams(structural_tag=tag), config).text
    assert json.loads(text)["format"]["json_schema"] == schema
    bad = {**more, "schema": {"type": "objekt"}}
    with pytest.raises(RequestError, match=r"'type' at '#/schema': 'objekt'"):
        source_of(StructuredOutputsParams(json=bad), config)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "schema": {}},
        {"properties": {"name": {}, "schema": {}}},
        {"name": "n", "schema": {}, "enum": [1]},
        {"title": "x"},
    ],
)
def test_a_schema_that_looks_like_a_wrapper_stays(schema):
    params = StructuredOutputsParams(json=schema)
    assert json.loads(source_of(params, StructuredOutputsConfig()).text) == schema


@pytest.mark.parametrize("given", [False, "false", {"schema": False, "name": "n"}])
def test_the_schema_false_admits_nothing(given):
    with pytest.raises(RequestError) as caught:
        source_of(StructuredOutputsParams(json=given), CONFIG)
    assert str(caught.value) == "structured_outputs.json: 'false' at '#': no value satisfies it"


@pytest.mark.parametrize("given", [{"not": {}}, {"not": True, "type": "string"}])
def test_a_schema_that_excludes_everything_admits_nothing(given):
    with pytest.raises(RequestError) as caught:
        source_of(StructuredOutputsParams(json=given), CONFIG)
    told = "'not' at '#': it excludes every value, so no value satisfies the schema"
    assert told in str(caught.value)


@pytest.mark.parametrize("backend", ["guidance", "xgrammar", "outlines", "lm-format-enforcer"])
@pytest.mark.parametrize("value", [True, False])
def test_required_on_a_property_itself_demands_nothing(backend, value):
    """So draft 3 wrote it, and so people still do."""
    inner = {"type": "object", "properties": {"b": {"type": "string"}}, "required": value}
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    source = source_of(StructuredOutputsParams(json=schema), CONFIG)
    assert "required" not in json.loads(source.text)["properties"]["a"]
    backend_class(backend).refuse(source.spec(backend))


@pytest.mark.parametrize(
    "given",
    [
        {"name": "p", "schema": {"type": "integer"}, "foo": 1},
        {"name": "p", "strict": True},
        {"name": "p", "description": "d", "parameters": {"type": "object"}},
        {"type ": "string"},
    ],
)
def test_what_is_hardly_meant_as_a_schema_is_refused(given):
    """As a schema it would allow everything."""
    with pytest.raises(RequestError, match="is not a keyword of JSON Schema"):
        source_of(StructuredOutputsParams(json=given), CONFIG)


@pytest.mark.parametrize(
    "given",
    [{}, {"title": "t"}, {"$schema": "x", "description": "d"}, {"type": "object", "x-a": 1}],
)
def test_schemas_may_demand_nothing(given):
    source_of(StructuredOutputsParams(json=given), CONFIG)
