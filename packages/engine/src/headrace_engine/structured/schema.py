"""JSON schemas as backends look at them: where schemas stand in a schema, and which keywords they
use. Source: JSON Schema drafts 4 to 2020-12."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from headrace_core.grammar import Refusal, malformed

Schema = Mapping[str, Any]

ONE = frozenset(
    {
        "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if",
        "items", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
"""Keywords whose value is a schema."""
LISTS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
"""Keywords whose value is a list of schemas (``items`` in drafts before 2020-12)."""
MAPS = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)
"""Keywords whose value maps names to schemas."""
ASSERTIONS = (ONE | LISTS | MAPS - {"$defs", "definitions"} - {"contentSchema"}) | {
    "$dynamicRef", "$recursiveRef", "$ref", "const", "dependentRequired", "enum",
    "exclusiveMaximum", "exclusiveMinimum", "format", "maxContains", "maxItems", "maxLength",
    "maxProperties", "maximum", "minContains", "minItems", "minLength", "minProperties", "minimum",
    "multipleOf", "pattern", "required", "type", "uniqueItems",
}  # fmt: skip
"""Keywords that say what an instance must be. All others are remarks, and are ignored."""
NUMBER_FORMATS = frozenset({"int32", "int64", "uint32", "uint64", "float", "double", "decimal"})
"""Formats that OpenAPI adds to numbers: remarks."""
_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "additionalItems": (True, {}), "additionalProperties": (True, {}), "contains": (),
    "dependencies": ({},), "dependentRequired": ({},), "dependentSchemas": ({},),
    "minItems": (0,), "minLength": (0,), "minProperties": (0,), "patternProperties": ({},),
    "propertyNames": (True, {}), "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}), "uniqueItems": (False,), "required": ([],),
}  # fmt: skip
"""Values with which a keyword demands nothing."""


def parse_json(text: str, kind: str) -> Any:
    """JSON text of a constraint of that kind.

    Raises:
        RequestError: it is none; says where.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise malformed(
            kind, f"no JSON: line {error.lineno} column {error.colno}: {error.msg}"
        ) from None
    except (ValueError, RecursionError):
        raise malformed(
            kind, "no JSON that can be read: nested too deep, or numbers too long"
        ) from None


def depth(value: Any) -> int:
    """Deepest nesting of lists and objects in a JSON value; 0 for a scalar. Does not recurse."""
    level, found = 0, [value]
    while found := [item for item in found if isinstance(item, (dict, list))]:
        level += 1
        found = [inner for item in found for inner in _items(item)]
    return level


def _items(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value)


def subschemas(schema: Any, pointer: str = "") -> Iterator[tuple[str, Any]]:
    """(JSON pointer, schema) of a schema and all in it, outer ones first."""
    pending = [(pointer, schema)]
    while pending:
        at, found = pending.pop()
        yield at, found
        if isinstance(found, Mapping):
            pending.extend(reversed(list(_inner(at, found))))


def _inner(pointer: str, schema: Schema) -> Iterator[tuple[str, Any]]:
    for keyword, value in schema.items():
        at = f"{pointer}/{escape(keyword)}"
        if keyword in MAPS and isinstance(value, Mapping):
            for name, inner in value.items():
                if isinstance(inner, (Mapping, bool)):
                    yield f"{at}/{escape(name)}", inner
        elif keyword in LISTS and isinstance(value, list):
            for index, inner in enumerate(value):
                yield f"{at}/{index}", inner
        elif keyword in ONE and isinstance(value, (Mapping, bool)):
            yield at, value


def escape(name: str) -> str:
    """A name as a part of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def unsupported(
    schema: Any, supported: frozenset[str], formats: frozenset[str] | None
) -> list[str]:
    """What a backend cannot do of a schema.

    Args:
        schema: parsed.
        supported: keywords that it enforces.
        formats: values of ``format`` that it enforces; None: all.

    Returns:
        One reason per keyword, with its place.
    """
    reasons = []
    for pointer, found in subschemas(schema):
        if not isinstance(found, Mapping):
            continue
        for keyword, value in found.items():
            reason = _why_not(keyword, value, supported, formats)
            if reason:
                reasons.append(Refusal.of(keyword, pointer, reason))
    return reasons


def _why_not(
    keyword: str, value: Any, supported: frozenset[str], formats: frozenset[str] | None
) -> str:
    if keyword not in ASSERTIONS or _demands_nothing(keyword, value):
        return ""
    if keyword not in supported:
        return "this keyword is not enforced by it"
    if keyword == "$ref" and not str(value).startswith("#"):
        return f"{value!r:.80} is outside of the schema, and nothing is fetched"
    if keyword == "format" and formats is not None and value not in formats | NUMBER_FORMATS:
        return (
            f"{value!r:.80} is none of the formats that it enforces ({', '.join(sorted(formats))})"
        )
    return ""


def _demands_nothing(keyword: str, value: Any) -> bool:
    return any(value == nothing and type(value) is type(nothing)
               for nothing in _NOTHING.get(keyword, ()))  # fmt: skip


def malformed_at(schema: Any) -> Iterator[str]:
    """What is wrong with a schema whatever the backend: values of a wrong type, with their place."""
    for pointer, found in subschemas(schema):
        if isinstance(found, bool):
            continue
        if not isinstance(found, Mapping):
            yield f"{found!r:.80} at {pointer or '/'!r} is no schema: must be an object or a boolean"
            continue
        for keyword, value in found.items():
            accepted = _accepted(keyword, value)
            if accepted:
                yield Refusal.of(keyword, pointer, f"{value!r:.80}: must be {accepted}")


_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


def _accepted(keyword: str, value: Any) -> str:
    """What the keyword's value must be; "" if it is."""
    checks: Mapping[str, tuple[bool, str]] = {
        "type": (
            value in _TYPES if isinstance(value, str)
            else isinstance(value, list) and bool(value) and all(t in _TYPES for t in value),
            f"one of {', '.join(_TYPES)}, or a list of them",
        ),
        "enum": (isinstance(value, list) and bool(value), "a list of at least one value"),
        "required": (
            (isinstance(value, list) and all(isinstance(v, str) for v in value))
            or isinstance(value, bool),
            "a list of names",
        ),
        "pattern": (isinstance(value, str), "a regex"),
        "format": (isinstance(value, str), "a format's name"),
        "$ref": (isinstance(value, str), "a reference such as '#/$defs/name'"),
    }  # fmt: skip
    if keyword in checks:
        right, accepted = checks[keyword]
        return "" if right else accepted
    if keyword in MAPS:
        return "" if isinstance(value, Mapping) else "an object of schemas"
    if keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
        return "" if isinstance(value, list) and value else "a list of at least one schema"
    if keyword.startswith(("min", "max")) and keyword in ASSERTIONS:
        whole = keyword not in ("minimum", "maximum")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or (whole and (value < 0 or value != int(value))):
            return "a whole number of at least 0" if whole else "a number"
    return ""


def without_additional_properties(schema: Any) -> Any:
    """The schema with every object that names properties closed to others."""

    def close(found: dict[str, Any]) -> dict[str, Any]:
        open_ = {"additionalProperties", "patternProperties"}.isdisjoint(found)
        return found | {"additionalProperties": False} if "properties" in found and open_ else found

    return _rewritten(schema, close)


def without_number_formats(schema: Any) -> Any:
    """The schema without ``format`` where it says how a number is stored."""

    def drop(found: dict[str, Any]) -> dict[str, Any]:
        name = found.get("format")
        if not isinstance(name, str) or name not in NUMBER_FORMATS:
            return found
        return {keyword: value for keyword, value in found.items() if keyword != "format"}

    return _rewritten(schema, drop)


def _rewritten(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy in which every schema has been changed, inner ones first."""
    if not isinstance(schema, dict):
        return schema
    copied = {}
    for keyword, value in schema.items():
        if keyword in MAPS and isinstance(value, dict):
            value = {name: _rewritten(inner, change) for name, inner in value.items()}
        elif keyword in LISTS and isinstance(value, list):
            value = [_rewritten(inner, change) for inner in value]
        elif keyword in ONE:
            value = _rewritten(value, change)
        copied[keyword] = value
    return change(copied)
