"""From ``response_format``, ``structured_outputs`` or another server's field to the one constraint of an
answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from headrace_core.errors import RequestError
from headrace_core.output import CompletionOutput
from headrace_core.sampling.params import CONSTRAINTS, StructuredOutputsParams
from headrace_server.protocols.base import check_size
from headrace_server.protocols.openai.bodies.sampling import RequestExtensions, SamplingBody
from headrace_server.protocols.openai.bodies.structured import (
    MAX_GRAMMAR,
    ResponseFormat,
    StructuredOutputs,
)

MAX_SCHEMA_DEPTH = 64


SPELLINGS: Mapping[str, str] = {
    "json_schema": "json",
    "grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
"""Fields of other servers' clients -> the kind of constraint that they ask for."""
_BACKENDS = ("auto", "guidance", "lm-format-enforcer", "outlines", "xgrammar")
_BACKEND_OPTIONS: Mapping[str, str] = {
    "disable-any-whitespace": "disable_any_whitespace",
    "no-additional-properties": "disable_additional_properties",
}
_EMPTY_IS_NONE = frozenset({"grammar", "ebnf"})
"""Fields that clients send empty where there is no constraint."""
_OF_TYPE: Mapping[str, tuple[str, ...]] = {
    "json_schema": ("json_schema",),
    "schema": ("json_object", "json_schema"),
    "format": ("structural_tag",),
    "structures": ("structural_tag",),
    "triggers": ("structural_tag",),
}
"""Fields of ``response_format`` -> the types that they belong to."""


class RequestedConstraint(NamedTuple):
    """The constraint that a body asks for."""

    field: str = ""
    """The client's field; empty: there is none."""
    constraint: StructuredOutputsParams | None = None

    @property
    def is_format(self) -> bool:
        """True if it is the form of answers, beside which tools may be called."""
        return self.field == "response_format"


def asked_of(body: SamplingBody) -> RequestedConstraint:
    """The constraint that a body asks for, by whichever field.

    Raises:
        RequestError: more or less than one constraint, or one that is incomplete; names the field.
    """
    options = _options(body)
    form = None if body.response_format is None else _of_format(body.response_format)
    ways = [] if form is None else ["response_format"]
    ways += [name for name in _WAYS if _is_given(name, getattr(body, name))]
    if len(ways) > 1:
        raise RequestError(
            f"{ways[1]}: cannot be combined with {_shown(ways[0], body)}: exactly one constraint can apply",
            param=ways[1],
        )
    if not ways:
        if body.guided_whitespace_pattern is not None:
            raise RequestError(
                "guided_whitespace_pattern: needs a constraint, guided_json for example",
                param="guided_whitespace_pattern",
            )
        return RequestedConstraint()
    (field,) = ways
    if field == "response_format":
        assert form is not None, "it is one of the ways"
        made = form
    elif field == "structured_outputs":
        assert body.structured_outputs is not None, "it is one of the ways"
        made = constraint_of(body.structured_outputs)
        if body.guided_whitespace_pattern is not None:
            raise RequestError(
                "guided_whitespace_pattern: cannot be combined with structured_outputs; send "
                "structured_outputs.whitespace_pattern",
                param="guided_whitespace_pattern",
            )
    else:
        made = _of_spelling(field, getattr(body, field))
    return RequestedConstraint(field, replace(made, **options) if options else made)


_WAYS = ("structured_outputs", *SPELLINGS)


def constrained_by(body: RequestExtensions, form: str | None = None) -> str | None:
    """The field that asks for a constraint: the first of those that all wires take, or a wire's own.

    Args:
        form: the wire's own field for the form of answers, if the request has it.
    """
    given = (name for name in _WAYS if _is_given(name, getattr(body, name)))
    return next(given, form)


def check_one_form(body: RequestExtensions, form: str) -> None:
    """Raises RequestError if a constraint stands beside a wire's own field for the form of answers.

    Args:
        form: that field, which the request has.
    """
    other = constrained_by(body)
    if other is not None:
        raise RequestError(
            f"{other}: cannot be combined with {form}: exactly one constraint can apply",
            param=other,
        )


def _is_given(name: str, value: Any) -> bool:
    if name in _EMPTY_IS_NONE:
        return bool(value and value.strip())
    return value is not None and not (name == "guided_json_object" and value is False)


def _shown(name: str, body: SamplingBody) -> str:
    form = body.response_format
    return f"response_format of type {form.type!r}" if form and name == "response_format" else name


def _options(body: SamplingBody) -> dict[str, Any]:
    """Options of a constraint in the fields of older vLLM."""
    options: dict[str, Any] = {}
    if body.guided_whitespace_pattern is not None:
        options["whitespace_pattern"] = body.guided_whitespace_pattern
    name, _, given = (body.guided_decoding_backend or "auto").partition(":")
    for option in filter(None, given.split(",")):
        if option not in _BACKEND_OPTIONS:
            raise RequestError(
                f"guided_decoding_backend: option {option[:64]!r} must be one of "
                f"{sorted(_BACKEND_OPTIONS)}; the server chooses the backend",
                param="guided_decoding_backend",
            )
        options[_BACKEND_OPTIONS[option]] = True
    if name not in _BACKENDS:
        raise RequestError(
            f"guided_decoding_backend = {name[:64]!r}: must be one of {list(_BACKENDS)}",
            param="guided_decoding_backend",
        )
    return options


def _of_spelling(field: str, value: Any) -> StructuredOutputsParams:
    kind = SPELLINGS[field]
    if kind in ("json", "structural_tag"):
        check_schema(field, value)
    if value == "":
        raise RequestError(f"{field} = '': must not be empty", param=field)
    values: dict[str, Any] = {kind: value}
    return StructuredOutputsParams(**values)


def spelling_of(field: str) -> dict[str, str]:
    """The engine's names of a constraint -> the client's field that it came from."""
    if field == "structured_outputs":
        return {}
    names = ("structured_outputs", *(f"structured_outputs.{name}" for name in CONSTRAINTS))
    pattern = {"structured_outputs.whitespace_pattern": "guided_whitespace_pattern"}
    return dict.fromkeys(names, field) | pattern


_FORM_FIELDS = "(structured_outputs, response_format or tools)"
"""The fields of a chat that constrain the form, as the engine names them for an output that cannot go on."""
_CONSTRAINT = re.compile(r"\bstructured_outputs(\.[a-z_]+)?\b")
_RULE = re.compile(r"\b(allowed_token_ids|bad_words|logit_bias|min_tokens)\b")
"""Further fields that the engine names for such an output."""


def in_client_words(text: str, spelling: Mapping[str, str]) -> str:
    """An engine's text with the client's name of the constraint.

    Args:
        text: of an error, or of an output that cannot go on.
        spelling: the engine's names of fields -> the client's (:func:`spelling_of`).
    """
    told = text.replace(_FORM_FIELDS, "(structured_outputs)")
    return _CONSTRAINT.sub(lambda found: spelling.get(found[0], found[0]), told)


def dead_end(text: str, spelling: Mapping[str, str]) -> str:
    """Why an output cannot go on, with the client's names of all fields that exclude tokens.

    Args:
        text: the engine's.
        spelling: as for :func:`in_client_words`.
    """
    told = _RULE.sub(lambda found: spelling.get(found[0], found[0]), text)
    return in_client_words(told, spelling)


def stop_reason(part: CompletionOutput, spelling: Mapping[str, str]) -> int | str | None:
    """Reason for which an output ended, as the client is told: a token, a text, or why it cannot go on.

    Args:
        spelling: as for :func:`in_client_words`.
    """
    reason = part.stop_reason
    if part.finish_reason == "error" and isinstance(reason, str):
        return dead_end(reason, spelling)
    return reason


def check_schema(name: str, schema: Any) -> None:
    """Bound depth, values and bytes of a schema or another free-form description.

    Raises:
        RequestError: naming the field.
    """
    check_size(name, schema, depth=MAX_SCHEMA_DEPTH)
    size = len(schema) if isinstance(schema, str) else len(json.dumps(schema, ensure_ascii=False))
    if size > MAX_GRAMMAR:
        raise RequestError(f"{name}: longer than {MAX_GRAMMAR} characters", param=name)


def _of_format(given: ResponseFormat) -> StructuredOutputsParams | None:
    for name, types in _OF_TYPE.items():
        value = given.schema_ if name == "schema" else getattr(given, name)
        if value is not None and given.type not in types:
            raise RequestError(
                f"response_format.{name}: has no meaning with type {given.type!r}; send type "
                f"{' or '.join(map(repr, types))} with it, or leave {name} out",
                param=f"response_format.{name}",
            )
    match given.type:
        case "text":
            return None
        case "json_object":
            if given.schema_ is not None:
                return StructuredOutputsParams(json=_schema(given))
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            return StructuredOutputsParams(json=_schema(given))
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=_tag(given))


def _schema(given: ResponseFormat) -> dict[str, Any] | bool:
    name, schema = "response_format.schema", given.schema_
    if given.json_schema is not None:
        if schema is not None:
            raise RequestError(
                f"{name}: cannot be combined with response_format.json_schema", param=name
            )
        name, schema = "response_format.json_schema.schema", given.json_schema.schema_
    elif schema is None:
        name = "response_format.json_schema"
        raise RequestError(
            f"{name}: must be given with type 'json_schema', as {{'name': ..., 'schema': {{...}}}}; or "
            "response_format.schema, the JSON schema itself",
            param=name,
        )
    if schema is None:
        raise RequestError(
            f"{name}: must be given: the JSON schema itself, beside 'name' and 'strict'", param=name
        )
    check_schema(name, schema)
    return schema


def _tag(given: ResponseFormat) -> dict[str, Any]:
    """Either form, as the client wrote it."""
    older = given.structures is not None or given.triggers is not None
    if older == (given.format is not None):
        raise RequestError(
            "response_format: type 'structural_tag' needs either 'format', or 'structures' and "
            "'triggers'",
            param="response_format",
        )
    if not older:
        check_schema("response_format.format", given.format)
        return {"type": "structural_tag", "format": given.format}
    if not given.structures or not given.triggers:
        raise RequestError(
            "response_format: 'structures' and 'triggers' must both be non-empty",
            param="response_format.structures" if given.triggers else "response_format.triggers",
        )
    structures = [
        {"begin": tag.begin, "schema": tag.schema_, "end": tag.end} for tag in given.structures
    ]
    check_schema("response_format.structures", structures)
    return {"type": "structural_tag", "structures": structures, "triggers": given.triggers}


def constraint_of(given: StructuredOutputs) -> StructuredOutputsParams:
    """The constraint of ``structured_outputs``.

    Raises:
        RequestError: more or less than one constraint, or one that is too large; names the field.
    """
    values = given.model_dump(by_alias=True)
    for name in ("json", "structural_tag"):
        if values[name] is not None:
            check_schema(f"structured_outputs.{name}", values[name])
    for name in CONSTRAINTS:
        if values[name] == "":
            raise RequestError(
                f"structured_outputs.{name} = '': must not be empty",
                param=f"structured_outputs.{name}",
            )
    return StructuredOutputsParams(**values)
