"""JSON schemas as the TypeScript-like types that gpt-oss models read tools in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 16
"""Deeper parts are written as ``any``."""
_NAMES = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "object",
}


def parameters_type(schema: Any) -> str:
    """A function's parameters: ``(_: {...}) => any``, or ``() => any`` if it takes none."""
    if not isinstance(schema, Mapping) or not _properties(schema):
        return "() => any"
    return f"(_: {_object(schema, '', 0)}) => any"


def type_of(schema: Any, indent: str = "", depth: int = 0) -> str:
    """A schema's type. What has no TypeScript form is ``any``."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return "any"
    for key in ("oneOf", "anyOf"):
        members = schema.get(key)
        if isinstance(members, list) and members:
            return " | ".join(dict.fromkeys(type_of(m, indent, depth + 1) for m in members))
    if isinstance(schema.get("enum"), list):
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"], ensure_ascii=False)
    return _by_name(schema, indent, depth)


def _by_name(schema: Mapping[str, Any], indent: str, depth: int) -> str:
    """Each part of a schema is visited once: no schema's type takes longer than its length."""
    given = schema.get("type")
    if isinstance(given, list):
        kinds = dict.fromkeys(kind for kind in given if isinstance(kind, str))
        return " | ".join(_named(kind, schema, indent, depth) for kind in kinds) or "any"
    return _named(given, schema, indent, depth)


def _named(kind: Any, schema: Mapping[str, Any], indent: str, depth: int) -> str:
    if kind == "array":
        item = type_of(schema.get("items"), indent, depth + 1)
        return f"({item})[]" if " | " in item else f"{item}[]"
    if kind in (None, "object") and _properties(schema):
        return _object(schema, indent, depth)
    return _NAMES.get(kind, "any") if isinstance(kind, str) else "any"


def _object(schema: Mapping[str, Any], indent: str, depth: int) -> str:
    required = schema.get("required")
    needed = required if isinstance(required, list) else []
    lines = ["{"]
    for name, field in _properties(schema).items():
        lines += [f"{indent}// {line}" for line in _comment(field)]
        mark = "" if name in needed else "?"
        kind = type_of(field, indent + "  ", depth + 1)
        lines.append(f"{indent}{name}{mark}: {kind},{_default(field)}")
    lines.append(f"{indent[:-2]}}}")
    return "\n".join(lines)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _comment(field: Any) -> list[str]:
    text = field.get("description") if isinstance(field, Mapping) else None
    return text.splitlines() if isinstance(text, str) else []


def _default(field: Any) -> str:
    if not isinstance(field, Mapping) or "default" not in field:
        return ""
    value = field["default"]
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f" // default: {shown}"
