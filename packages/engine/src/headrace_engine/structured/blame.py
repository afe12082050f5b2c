"""The part of a JSON schema to blame when a compiler only says that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from headrace_engine.structured.schema import ASSERTIONS, subschemas

MOST_TRIES = 300
"""Schemas that are compiled alone in search of the culprit."""


def blame(schema: Any, error_of: Callable[[Any], str], error: str) -> tuple[str, str, str]:
    """(keyword, JSON pointer, error) of the innermost schema that alone gives the same error; if
    that is the whole, of the innermost one that gives any.

    Args:
        schema: parsed, with the error.
        error_of: compiles a schema; "" or what it says.
        error: what it says of the whole schema.
    """
    pointer, culprit = _innermost(schema, lambda part: error_of(part) == error)
    if not pointer:
        pointer, culprit = _innermost(schema, lambda part: error_of(part) != "")
        error = error_of(_alone(culprit, schema)) if pointer else error
    return _keyword(culprit, schema, error_of, error), pointer, error


def _innermost(schema: Any, fails: Callable[[Any], bool]) -> tuple[str, Any]:
    """(JSON pointer, schema) of the innermost schema that alone fails, references followed."""
    parts = dict(subschemas(schema))
    pointer, culprit = "", schema
    tries, seen = 0, {""}
    while tries < MOST_TRIES:
        for at, found in parts.items():
            deeper = len(at) > len(pointer) and at.startswith(pointer)
            if not deeper or not isinstance(found, Mapping):
                continue
            tries += 1
            if tries > MOST_TRIES:
                break
            if fails(_alone(found, schema)):
                pointer, culprit = at, found
        target = unquote(str(culprit.get("$ref", ""))[1:]) if isinstance(culprit, Mapping) else ""
        if target in seen or target not in parts:
            break
        seen.add(target)
        tries += 1
        if not fails(_alone(parts[target], schema)):
            break
        pointer, culprit = target, parts[target]
    return pointer, culprit


def _alone(found: Any, root: Any) -> Any:
    """A part of the schema as a schema of its own, with the definitions it may refer to."""
    if not isinstance(found, Mapping):
        return found
    kept = {name: root[name] for name in ("$defs", "definitions", "$schema") if name in root}
    return kept | dict(found)


def _keyword(culprit: Any, root: Any, error_of: Callable[[Any], str], error: str) -> str:
    if not isinstance(culprit, Mapping):
        return "false"
    asserted = sorted(
        (keyword for keyword in culprit if keyword in ASSERTIONS), key=lambda k: k == "type"
    )
    without = {
        keyword: error_of(_alone({k: v for k, v in culprit.items() if k != keyword}, root))
        for keyword in asserted
    }
    cured = [keyword for keyword in asserted if not without[keyword]]
    changed = [keyword for keyword in asserted if without[keyword] != error]
    return next(iter(cured or changed or asserted), "schema")
