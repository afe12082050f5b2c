"""Which part of a JSON schema a compiler means when it only says that it will not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
    pointer, culprit = "", schema
    tries = 0
    for at, found in subschemas(schema):
        if len(at) <= len(pointer) or not at.startswith(pointer) or not isinstance(found, Mapping):
            continue
        tries += 1
        if tries > MOST_TRIES:
            break
        if fails(_alone(found, schema)):
            pointer, culprit = at, found
    return pointer, culprit


def _alone(found: Mapping[str, Any], root: Any) -> dict[str, Any]:
    """A part of the schema as a schema of its own, with the definitions it may refer to."""
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
