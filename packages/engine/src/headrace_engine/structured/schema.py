"""JSON schemas as backends look at them: where schemas stand in a schema, and which keywords they
use. Source: JSON Schema drafts 4 to 2020-12."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from headrace_core.grammar import Refusal, malformed

Schema = Mapping[str, Any]

MAX_WHITESPACE = 32
"""Characters of white space in a row that JSON may hold unless a request says otherwise: enough for
an indented text, and an end to what some models write once they have begun."""
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
REMARKS = frozenset(
    {
        "$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "contentEncoding",
        "contentMediaType", "contentSchema", "default", "definitions", "deprecated", "description",
        "examples", "id", "readOnly", "title", "writeOnly",
    }
)  # fmt: skip
"""Keywords that demand nothing of an instance."""
COUNTS = frozenset(
    {
        "maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems",
        "minLength", "minProperties",
    }
)  # fmt: skip
"""Keywords that count."""
NUMBERS = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"})
"""Keywords whose value is a number."""
MAX_COUNT = 2**31 - 1
"""Most characters, items or properties that a schema may demand: no output is so long."""
MAX_NUMBER = sys.float_info.max
_MOST = frozenset(keyword for keyword in COUNTS if keyword.startswith("max"))
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
                if not (
                    keyword == "dependencies" and isinstance(inner, list)
                ):  # names, not a schema
                    yield f"{at}/{escape(name)}", inner
        elif keyword in LISTS and isinstance(value, list):
            for index, inner in enumerate(value):
                yield f"{at}/{index}", inner
        elif keyword in ONE:
            yield at, value


def numbers_in(value: Any) -> Iterator[float]:
    """All numbers in a JSON value. Does not recurse."""
    pending = [value]
    while pending:
        found = pending.pop()
        if isinstance(found, (dict, list)):
            pending += _items(found)
        elif isinstance(found, (int, float)) and not isinstance(found, bool):
            yield found


def escape(name: str) -> str:
    """A name as a part of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def unsupported(
    schema: Any, supported: frozenset[str], formats: frozenset[str] | None
) -> list[str]:
    """Parts of a schema that a backend cannot do.

    Args:
        schema: parsed.
        supported: keywords that it enforces.
        formats: values of ``format`` that it enforces; None: all.

    Returns:
        One reason per keyword, with its place.
    """
    reasons: list[str] = []
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


_WRAPPER = frozenset({"description", "name", "schema", "strict"})
"""Keys of OpenAI's ``json_schema``, which holds a schema; none of them but the harmless ``description`` is a
keyword of schemas."""


def unwrapped(schema: Any) -> tuple[Any, str]:
    """(the schema itself, its JSON pointer), of one that may be in OpenAI's wrapper, ``{"name": ...,
    "schema": {...}}``. As a schema the wrapper would allow everything."""
    if isinstance(schema, Mapping) and "schema" in schema and schema.keys() <= _WRAPPER:
        return schema["schema"], "/schema"
    return schema, ""


def within(reason: str, pointer: str) -> str:
    """A reason that names a place in a schema, for the document in which the schema stands.

    Args:
        reason: as :meth:`Refusal.of` makes them.
        pointer: of the schema, in the document.
    """
    return re.sub(r" at (['\"])#", lambda quote: f" at {quote[1]}#{pointer}", reason, count=1)


def malformed_at(schema: Any) -> Iterator[str]:
    """Faults of a schema whatever the backend: values of a wrong type, with their place."""
    for pointer, found in subschemas(schema):
        if isinstance(found, bool):
            continue
        if isinstance(found, Mapping) and _leads_nowhere(found.get("$ref"), schema):
            yield Refusal.of("$ref", pointer, f"{found['$ref']!r:.80} leads nowhere")
        if not isinstance(found, Mapping):
            yield f"{found!r:.80} at {'#' + pointer!r} is not a schema: must be an object or a boolean"
            continue
        for keyword, value in found.items():
            accepted = _accepted(keyword, value)
            if accepted:
                yield Refusal.of(keyword, pointer, f"{value!r:.80}: must be {accepted}")


def no_schema(value: Any) -> str:
    """Reason why an object is hardly meant as a schema: it demands nothing, and has names that are not
    keywords; "" if it may be."""
    if not isinstance(value, Mapping) or value.keys() & ASSERTIONS:
        return ""
    foreign = sorted(map(str, value.keys() - REMARKS))
    if not foreign:
        return ""
    return (
        f"{foreign[0]!r:.80} at '#': is not a keyword of JSON Schema, and nothing else demands anything; "
        "send the schema itself"
    )


_NOWHERE = object()


def _leads_nowhere(reference: Any, root: Any) -> bool:
    """True if a reference by JSON pointer has no target."""
    return isinstance(reference, str) and _target(reference, root) is _NOWHERE


def _target(reference: str, root: Any) -> Any:
    """The target of a reference by JSON pointer; None if it is of another kind."""
    if not (reference == "#" or reference.startswith("#/")):
        return None
    found = root
    for part in unquote(reference[2:]).split("/") if reference != "#" else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return _NOWHERE
    return found


_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


def _accepted(keyword: str, value: Any) -> str:
    """The form that the keyword's value must have; "" if it has it."""
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
    if keyword in ("const", "enum") and not all(map(_is_finite, numbers_in(value))):
        return f"of numbers in -{MAX_NUMBER:g}..{MAX_NUMBER:g}"
    if keyword in checks:
        right, accepted = checks[keyword]
        return "" if right else accepted
    if keyword in MAPS:
        return "" if isinstance(value, Mapping) else "an object of schemas"
    if keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
        return "" if isinstance(value, list) and value else "a list of at least one schema"
    if keyword in COUNTS:
        if not _is_finite(value) or value < 0 or value != int(value):
            return "a whole number of at least 0"
        return f"at most {MAX_COUNT}" if keyword.startswith("min") and value > MAX_COUNT else ""
    if keyword in NUMBERS and not _is_finite(value):
        return f"a number in -{MAX_NUMBER:g}..{MAX_NUMBER:g}"
    return "a number above 0" if keyword == "multipleOf" and value <= 0 else ""


def _is_finite(value: Any) -> bool:
    """True for a number that a double holds, exactly or nearly."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and -MAX_NUMBER <= value <= MAX_NUMBER


def without_additional_properties(schema: Any) -> Any:
    """The schema with every object that names properties closed to others."""

    def close(found: dict[str, Any]) -> dict[str, Any]:
        open_ = {"additionalProperties", "patternProperties"}.isdisjoint(found)
        return found | {"additionalProperties": False} if "properties" in found and open_ else found

    return rewritten(schema, close)


def without_idle_keywords(schema: Any) -> Any:
    """The schema without keywords that demand nothing, without ``format`` where it says how a number is
    stored, and without ``required`` on a property itself, as in draft 3. Counts such as 3.0 become
    integers; what would be too many for any output is no limit."""

    def drop(found: dict[str, Any]) -> dict[str, Any]:
        found = {k: int(v) if k in COUNTS else v for k, v in found.items()}
        return {
            k: v
            for k, v in found.items()
            if not (
                _demands_nothing(k, v)
                or _stores(k, v)
                or (k in _MOST and v > MAX_COUNT)
                or (k == "required" and isinstance(v, bool))
            )
        }

    return rewritten(schema, drop)


def _stores(keyword: str, value: Any) -> bool:
    return keyword == "format" and isinstance(value, str) and value in NUMBER_FORMATS


def rewritten(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy in which every schema has been changed, inner ones first."""
    if not isinstance(schema, dict):
        return schema
    copied = {}
    for keyword, value in schema.items():
        if keyword in MAPS and isinstance(value, dict):
            value = {name: rewritten(inner, change) for name, inner in value.items()}
        elif keyword in LISTS and isinstance(value, list):
            value = [rewritten(inner, change) for inner in value]
        elif keyword in ONE:
            value = rewritten(value, change)
        copied[keyword] = value
    return change(copied)


ALTERNATIVES = frozenset({"$ref", "allOf", "anyOf", "const", "enum", "oneOf"})
"""Keywords that some compilers take for the whole of a schema."""
_BY_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset({"format", "maxLength", "minLength", "pattern"}),
    "array": frozenset({"items", "maxItems", "minItems", "prefixItems"}),
    "object": frozenset(
        {"additionalProperties", "maxProperties", "minProperties", "patternProperties",
         "properties", "propertyNames", "required"}
    ),
    "number": frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"}),
}  # fmt: skip


def entangled(schema: Any) -> list[str]:
    """Combinations that a compiler gets wrong if it looks at one keyword after the other: alternatives that
    stand beside other keywords, keywords of a type that the schema does not state, and required
    properties that it does not describe."""
    reasons: list[str] = []
    for pointer, found in subschemas(schema):
        if not isinstance(found, Mapping):
            continue
        asserted = [k for k, v in found.items() if k in ASSERTIONS and not _demands_nothing(k, v)]
        whole = [keyword for keyword in asserted if keyword in ALTERNATIVES]
        others = [keyword for keyword in asserted if keyword not in (*whole[:1], "type")]
        if whole and (others or ("type" in found and not _values_fit(found))):
            beside = ", ".join(map(repr, others)) or "'type'"
            reasons.append(Refusal.of(whole[0], pointer, f"not enforced by it beside {beside}"))
        elif not whole:
            reasons += _untyped(found, asserted, pointer)
        reasons += _unnamed(found, pointer)
    return reasons


def _unnamed(schema: Schema, pointer: str) -> Iterator[str]:
    """Required properties that the schema does not describe; references by name."""
    missing = [n for n in schema.get("required", []) if n not in schema.get("properties", {})]
    if missing:
        yield Refusal.of("required", pointer, f"{missing[0]!r:.80} is not in 'properties'")
    reference = schema.get("$ref", "#")
    if reference != "#" and not reference.startswith("#/"):
        yield Refusal.of("$ref", pointer, f"{reference!r:.80}: only '#' and '#/...'")


def _values_fit(schema: Schema) -> bool:
    """True if all values of ``enum`` or ``const`` are of the schema's type."""
    values = schema.get("enum", [schema.get("const")] if "const" in schema else None)
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return values is not None and all(any(_is_of(v, t) for t in types) for v in values)


def _is_of(value: Any, type_: str) -> bool:
    kinds: Mapping[str, tuple[type, ...]] = {
        "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
        "null": (type(None),), "array": (list,), "object": (dict,),
    }  # fmt: skip
    return isinstance(value, kinds[type_]) and (type_ == "boolean" or not isinstance(value, bool))


def _untyped(schema: Schema, asserted: list[str], pointer: str) -> Iterator[str]:
    types = schema.get("type")
    stated = set(types if isinstance(types, list) else [types])
    stated |= {"number"} if "integer" in stated else set()
    for type_, keywords in _BY_TYPE.items():
        for keyword in asserted:
            if keyword in keywords and type_ not in stated:
                yield Refusal.of(keyword, pointer, f"not enforced by it unless 'type' is {type_!r}")


def is_recursive(schema: Any) -> bool:
    """True if a reference by JSON pointer leads back to itself. Takes linear time."""
    known = {id(found): found for _, found in subschemas(schema) if isinstance(found, Mapping)}
    left = {}
    coming_from: dict[int, list[int]] = {key: [] for key in known}
    for key, found in known.items():
        followers = _followers(found, schema, known)
        left[key] = len(followers)
        for follower in followers:
            coming_from[follower].append(key)
    free = [key for key, count in left.items() if not count]
    for gone in free:  # takes away what leads nowhere any more; a circle stays
        for key in coming_from[gone]:
            left[key] -= 1
            if not left[key]:
                free.append(key)
    return len(free) < len(known)


def _followers(schema: Schema, root: Any, known: Mapping[int, Schema]) -> set[int]:
    found = {id(inner) for _, inner in _inner("", schema)}
    if isinstance(schema.get("$ref"), str):
        found.add(id(_target(schema["$ref"], root)))
    return found & known.keys()
