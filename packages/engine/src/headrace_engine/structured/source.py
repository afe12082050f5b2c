"""From what a request asks for to a :class:`GrammarSpec`, checked as far as that is quick."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from headrace_core.errors import RequestError
from headrace_core.grammar import GrammarSpec, malformed
from headrace_core.sampling.params import StructuredOutputsParams
from headrace_engine.config import StructuredOutputsConfig
from headrace_engine.structured.schema import (
    depth,
    escape,
    malformed_at,
    no_schema,
    parse_json,
    subschemas,
    unwrapped,
    within,
    without_additional_properties,
    without_idle_keywords,
)

MAX_CHOICES = 10_000
BYTE_ORDER_MARK = "\ufeff"
"""With which some editors begin files of grammars and schemas."""
_SCHEMA_KEYS = ("json_schema", "schema")
"""Keys of a structural tag that hold a JSON schema."""


class ConstraintSource(NamedTuple):
    """A constraint's text, the same for every backend."""

    kind: str
    text: str
    whitespace_pattern: str | None
    any_whitespace: bool

    def spec(self, backend: str) -> GrammarSpec:
        """The constraint for one backend."""
        return GrammarSpec(backend, *self)


def source_of(params: StructuredOutputsParams, config: StructuredOutputsConfig) -> ConstraintSource:
    """Check a constraint and put it into its plain form.

    Takes time linear in the constraint's size, whatever it says.

    Raises:
        RequestError: too large, too deep, or malformed; names keyword and JSON pointer.
    """
    kind = params.kind
    given = getattr(params, kind)
    closed = params.disable_additional_properties or config.disable_additional_properties
    if kind == "json":
        text = _json_text(given, kind, config)
        schema, home = unwrapped(parse_json(text, kind))
        _check_schema(schema, kind, config, home)
        if schema is False:
            raise malformed(kind, "'false' at '#': no value satisfies it")
        if isinstance(schema, Mapping) and schema.get("not") in (True, {}):
            raise malformed(
                kind, "'not' at '#': it excludes every value, so no value satisfies the schema"
            )
        text = _dump({} if schema is True else _plain_schema(schema, closed), kind)
    elif kind == "structural_tag":
        text = _json_text(given, kind, config)
        tag = parse_json(text, kind)
        for pointer, schema in _schemas_in(tag):
            _check_schema(schema, kind, config, pointer)
        for pointer, pattern in _patterns_in(tag):
            _check_regex(pattern, pointer, kind, config)
        text = _dump(_with_plain_schemas(tag, closed), kind)
    elif kind == "choice":
        text = _dump(list(dict.fromkeys(given)), kind)
        _check_count("choice", len(given), MAX_CHOICES, "texts")
    else:
        text = "" if kind == "json_object" else given
        if kind == "grammar":
            text = text.removeprefix(BYTE_ORDER_MARK)
    _check_text(text, kind, config)
    if kind == "regex":
        _check_regex(text, "", kind, config)
    whitespace = params.whitespace_pattern
    if whitespace is not None:
        _check_regex(whitespace, "", "whitespace_pattern", config)
    compact = params.disable_any_whitespace or config.disable_any_whitespace
    if whitespace is not None and compact:
        raise RequestError(
            f"structured_outputs.whitespace_pattern = {whitespace!r:.100}: must be absent while "
            "disable_any_whitespace is on",
            param="structured_outputs.whitespace_pattern",
        )
    return ConstraintSource(kind, text, whitespace, not compact)


def _json_text(given: Any, kind: str, config: StructuredOutputsConfig) -> str:
    if isinstance(given, str):
        given = given.removeprefix(BYTE_ORDER_MARK)
        _check_text(given, kind, config)
        parsed = parse_json(given, kind)
    else:
        parsed = given
    nested = depth(parsed)
    if nested > 2 * config.max_depth:
        _check_count(kind, nested, 2 * config.max_depth, "levels of JSON")
    return given if isinstance(given, str) else _dump(parsed, kind)


def _dump(value: Any, kind: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise malformed(kind, "must be plain data (JSON)") from None
    return text


def _check_text(text: str, kind: str, config: StructuredOutputsConfig) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise malformed(kind, "holds half of a surrogate pair, which is not text") from None
    _check_count(kind, size, config.max_source_bytes, "bytes")


def _check_count(kind: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise malformed(kind, f"{count} {what}: must be at most {most}")


def _check_schema(schema: Any, kind: str, config: StructuredOutputsConfig, home: str = "") -> None:
    """Raises RequestError unless it is a schema of usual size; ``home`` is its JSON pointer."""
    wrong = next(malformed_at(schema), no_schema(schema))
    if wrong:
        raise malformed(kind, within(wrong, home))
    for pointer, found in subschemas(schema, home):
        levels = pointer.count("/") - home.count("/")
        if levels > 2 * config.max_depth:
            raise malformed(kind, f"{levels} levels at {pointer[:80]!r}: must be at most "
                            f"{2 * config.max_depth}")  # fmt: skip
        if isinstance(found, Mapping):
            _check_patterns(found, pointer, kind, config)


def _check_patterns(
    schema: Mapping[str, Any], pointer: str, kind: str, config: StructuredOutputsConfig
) -> None:
    if isinstance(schema.get("pattern"), str):
        _check_regex(schema["pattern"], f"{pointer}/pattern", kind, config)
    named = schema.get("patternProperties")
    for pattern in named if isinstance(named, Mapping) else ():
        _check_regex(pattern, f"{pointer}/patternProperties", kind, config)


def _check_regex(text: str, pointer: str, kind: str, config: StructuredOutputsConfig) -> None:
    where = f" at {'#' + pointer!r}" if pointer else ""
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise malformed(kind, f"a regex{where} ends with a backslash: must escape a character")
    if len(text) > config.max_regex_length:
        raise malformed(
            kind,
            f"a regex of {len(text)} characters{where}: must be at most {config.max_regex_length}",
        )


def _plain_schema(schema: Any, closed: bool) -> Any:
    """The schema without keywords that say nothing; ``closed``: without further properties."""
    schema, _ = unwrapped(schema)
    return without_idle_keywords(without_additional_properties(schema) if closed else schema)


def _with_plain_schemas(tag: Any, closed: bool) -> Any:
    """A structural tag, its JSON schemas as :func:`_plain_schema` makes them."""
    if isinstance(tag, list):
        return [_with_plain_schemas(part, closed) for part in tag]
    if not isinstance(tag, dict):
        return tag
    return {
        key: _plain_schema(part, closed)
        if key in _SCHEMA_KEYS
        else _with_plain_schemas(part, closed)
        for key, part in tag.items()
    }


def _patterns_in(tag: Any) -> list[tuple[str, str]]:
    """(JSON pointer, regex) of the regexes within a structural tag."""
    found: list[tuple[str, str]] = []
    pending = [("", tag)]
    while pending:
        at, value = pending.pop()
        if isinstance(value, dict):
            if value.get("type") == "regex" and isinstance(value.get("pattern"), str):
                found.append((f"{at}/pattern", value["pattern"]))
            pending += [
                (f"{at}/{escape(str(k))}", v) for k, v in value.items() if k not in _SCHEMA_KEYS
            ]
        elif isinstance(value, list):
            pending += [(f"{at}/{index}", part) for index, part in enumerate(value)]
    return found


def _schemas_in(tag: Any) -> list[tuple[str, Any]]:
    """(JSON pointer, schema) of the JSON schemas within a structural tag."""
    found: list[tuple[str, Any]] = []
    pending = [("", tag)]
    while pending:
        at, value = pending.pop()
        inner: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
        inner = enumerate(value) if isinstance(value, list) else inner
        for key, part in inner:
            below = f"{at}/{escape(str(key))}"
            if key in _SCHEMA_KEYS:
                schema, inner_home = unwrapped(part)
                found.append((below + inner_home, schema))
            else:
                pending.append((below, part))
    return found
