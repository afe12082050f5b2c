"""Values that a format writes as bare text, spelled as JSON by the type that the tool's schema
gives them.

A string's text is the string. Other types are read as JSON; text that is none of them, and
parameters that the schema does not know, are strings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace_server.tool_parsers.python_literals import read_literal

_MAX_STEPS = 64
"""References and alternatives that are followed in one schema."""
_NAMES = {
    "str": "string", "text": "string", "int": "integer", "float": "number", "double": "number",
    "bool": "boolean", "dict": "object", "list": "array", "none": "null",
}  # fmt: skip
"""Spellings of types that tools use besides JSON Schema's."""
ANY = frozenset({"any"})


class SchemaValues:
    """The parameters of some tools.

    Args:
        tools: as requests give them, with or without ``function`` around name and parameters.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}
        self._types: dict[tuple[str, str], frozenset[str]] = {}
        """Types of parameters that the schemas know and that were asked for."""
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping):
                schema = function.get("parameters")
                if isinstance(schema, Mapping):
                    self._schemas[str(function.get("name"))] = schema

    def spell(self, function: str, parameter: str, text: str) -> str:
        """The value as JSON text."""
        return spell(text, self.types(function, parameter))

    def types(self, function: str, parameter: str) -> frozenset[str]:
        """Types that a parameter may have, by JSON Schema's names, or :data:`ANY`.

        A parameter that is not in the schema is a string.
        """
        known = self._types.get((function, parameter))
        if known is not None:
            return known
        schema = self._schemas.get(function, {})
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or parameter not in properties:
            return frozenset({"string"})
        found = self._types[function, parameter] = _types(properties[parameter], schema)
        return found


def spell(text: str, types: frozenset[str]) -> str:
    """A value of one of these types as JSON text.

    Types are tried from the narrowest to the widest, a string last.
    """
    if types == {"string"}:
        return spell_string(text)
    value = text.strip()
    if types & {"null", "any"} and value.lower() in ("null", "none"):
        return "null"
    if types & {"boolean", "any"} and value.lower() in ("true", "false"):
        return value.lower()
    spelled = _checked(value, types)
    if spelled is None and (rewritten := _as_json(value, types)) is not None:
        spelled = _checked(rewritten, types)
    return spell_string(text) if spelled is None else spelled


def spell_string(text: str) -> str:
    """A string as JSON; readable, unless that could not be sent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False)


def _as_json(value: str, types: frozenset[str]) -> str | None:
    """Value that a model wrote in Python's spelling in place of an object or a list."""
    return read_literal(value) if types & {"object", "array"} and value[:1] in "{[(" else None


def _checked(value: str, types: frozenset[str]) -> str | None:
    """``value``, if it is JSON of one of the types."""
    try:
        decoded = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    kind = _kind(decoded)
    if "any" in types or kind in types or (kind == "integer" and "number" in types):
        return None if kind == "string" and "any" not in types else value
    if kind == "number" and "integer" in types and decoded.is_integer():
        return str(int(decoded))
    return None


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
    return "array"


def _types(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """Types that a schema allows, references and alternatives followed."""
    found: set[str] = set()
    waiting = [schema]
    for _ in range(_MAX_STEPS):
        if not waiting:
            break
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        given = part.get("type")
        names = given if isinstance(given, list) else [given] if given is not None else []
        found |= {_NAMES.get(str(name).lower(), str(name).lower()) for name in names}
        if not names:
            values = part["enum"] if isinstance(part.get("enum"), list) else []
            values = [*values, part["const"]] if "const" in part else values
            found |= {_kind(value) for value in values}
        for word in ("anyOf", "oneOf", "allOf"):
            if isinstance(part.get(word), list):
                waiting += part[word]
        if isinstance(part.get("$ref"), str):
            waiting.append(_target(part["$ref"], root))
    return frozenset(found) or ANY


def _target(reference: str, root: Mapping[str, Any]) -> object:
    """Schema that a local JSON pointer points to; None if nothing."""
    if not reference.startswith("#/"):
        return None
    part: object = root
    for step in reference[2:].split("/"):
        if not isinstance(part, Mapping):
            return None
        part = part.get(step.replace("~1", "/").replace("~0", "~"))
    return part
