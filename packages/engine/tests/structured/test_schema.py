"""Schemas as backends look at them."""

import pytest

from headrace_engine.structured.blame import blame
from headrace_engine.structured.schema import (
    depth,
    entangled,
    is_recursive,
    malformed_at,
    subschemas,
    unsupported,
    without_additional_properties,
    without_idle_keywords,
)


def test_schemas_are_found_where_schemas_stand_and_nowhere_else():
    schema = {
        "properties": {"not": {"items": [True, {"a": 1}]}, "a/b": {"enum": [{"not": {}}]}},
        "default": {"not": {"type": "foo"}},
        "anyOf": [{"$defs": {"x": {}}}],
    }
    assert [pointer for pointer, _ in subschemas(schema)] == [
        "", "/properties/not", "/properties/not/items/0", "/properties/not/items/1",
        "/properties/a~1b", "/anyOf/0", "/anyOf/0/$defs/x",
    ]  # fmt: skip


def test_depth_does_not_recurse():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert depth(deep) == 100_001
    while deep:  # else freeing it recurses
        deep = deep[0]
    assert [depth(value) for value in (1, [], {"a": [1]}, [[], [[]]])] == [0, 1, 2, 3]


def test_what_is_unsupported_is_named_with_its_place():
    schema = {"properties": {"a": {"not": {}, "title": "not"}, "b": {"format": "odd"}}}
    reasons = unsupported(schema, frozenset({"properties", "format"}), frozenset({"date"}))
    assert [r.split(":")[0] for r in reasons] == [
        "'not' at '#/properties/a'",
        "'format' at '#/properties/b'",
    ]
    assert unsupported({"uniqueItems": False, "title": "x"}, frozenset(), None) == []


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "strin"}, "'type' at '#'"),
        ({"properties": {"a": {"enum": []}}}, "'enum' at '#/properties/a'"),
        ({"items": {"minLength": -1}}, "'minLength' at '#/items'"),
        ({"anyOf": []}, "'anyOf' at '#'"),
        ({"properties": []}, "'properties' at '#'"),
        ({"$defs": {"a": {}}, "$ref": "#/$defs/b"}, "'$ref' at '#'"),
        ({"anyOf": [5]}, "5 at '#/anyOf/0'"),
        (7, "7 at '#'"),
    ],
)
def test_what_is_no_schema_is_named_with_its_place(schema, place):
    assert next(malformed_at(schema)).startswith(place)


def test_references_lead_through_lists_and_escapes():
    schema = {"anyOf": [{"type": "null"}], "$defs": {"a/b~c": {}, "d": {"$ref": "#/anyOf/0"}}}
    assert not list(malformed_at({**schema, "$ref": "#/$defs/a~1b~0c"}))
    assert list(malformed_at({**schema, "$ref": "#/anyOf/1"}))


def test_alternatives_beside_other_keywords_are_entangled():
    assert not entangled({"type": "string", "enum": ["a"]})
    assert not entangled({"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}]}}})
    assert entangled({"type": "string", "enum": [1]})
    assert entangled({"$ref": "#/$defs/a", "minLength": 2, "$defs": {"a": {}}})
    assert entangled({"minimum": 3})
    assert not entangled({"type": "integer", "minimum": 3})


def test_idle_keywords_and_open_objects():
    inner = {"type": "array", "uniqueItems": False, "items": {"type": "integer", "format": "int64"}}
    schema = {
        "properties": {"format": inner},
        "additionalProperties": True,
        "const": {"minItems": 0},
    }
    plain = without_idle_keywords(schema)
    assert plain == {
        "properties": {"format": {"type": "array", "items": {"type": "integer"}}},
        "const": {"minItems": 0},
    }
    closed = without_additional_properties({"anyOf": [plain, {"type": "object"}]})
    assert closed["anyOf"][0]["additionalProperties"] is False
    assert closed["anyOf"][1] == {"type": "object"}


def test_blame_finds_the_innermost_culprit():
    def error_of(schema):
        return "bad" if "'pattern': 'x'" in str(schema) else ""

    schema = {"properties": {"a": {"items": {"type": "string", "pattern": "x"}}, "b": {}}}
    assert blame(schema, error_of, "bad") == (
        "pattern", "/properties/a/items", "bad",
    )  # fmt: skip


def test_circles_of_references():
    node = {"properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
    assert is_recursive({"$defs": {"node": node}, "$ref": "#/$defs/node"})
    assert is_recursive({"items": {"$ref": "#"}})
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    assert not is_recursive({"$defs": {**chain, "d3000": {}}, "$ref": "#/$defs/d0"})
    assert is_recursive({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}})
