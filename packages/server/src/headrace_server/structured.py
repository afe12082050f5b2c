"""From ``response_format`` or ``structured_outputs`` to the one constraint of an answer."""

from __future__ import annotations

import json
from typing import Any

from headrace_core.errors import RequestError
from headrace_core.sampling import CONSTRAINTS, StructuredOutputsParams
from headrace_server.protocol.base import check_size
from headrace_server.protocol.structured import (
    MAX_GRAMMAR,
    ResponseFormat,
    StructuredOutputs,
)

MAX_SCHEMA_DEPTH = 64


def constraint_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> StructuredOutputsParams | None:
    """The constraint that a body asks for, None if it asks for none.

    Raises:
        RequestError: more or less than one constraint, or one that is incomplete; names the field.
    """
    formatted = _of_format(response_format) if response_format is not None else None
    if structured_outputs is None:
        return formatted
    if formatted is not None:
        raise RequestError(
            f"structured_outputs: not along with response_format of type "
            f"{response_format.type!r}: exactly one constraint can hold",  # type: ignore[union-attr]
            param="structured_outputs",
        )
    return _of_object(structured_outputs)


def spelling_of(field: str) -> dict[str, str]:
    """The engine's names of a constraint -> the client's field that it came from."""
    if field == "structured_outputs":
        return {}
    names = ("structured_outputs", *(f"structured_outputs.{name}" for name in CONSTRAINTS))
    return dict.fromkeys(names, field)


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
    match given.type:
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            return StructuredOutputsParams(json=_schema(given))
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=_tag(given))


def _schema(given: ResponseFormat) -> dict[str, Any] | bool:
    name = "response_format.json_schema"
    if given.json_schema is None:
        raise RequestError(f"{name}: must be given with type 'json_schema'", param=name)
    schema = given.json_schema.schema_
    if schema is None:
        raise RequestError(f"{name}.schema: must be given", param=f"{name}.schema")
    check_schema(f"{name}.schema", schema)
    # False would be read as "no constraint given"; it is the schema that nothing satisfies.
    return {"not": {}} if schema is False else schema


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
            "response_format: 'structures' and 'triggers' must both hold something",
            param="response_format.structures" if given.triggers else "response_format.triggers",
        )
    structures = [tag.model_dump(by_alias=True) for tag in given.structures]
    check_schema("response_format.structures", structures)
    return {"type": "structural_tag", "structures": structures, "triggers": given.triggers}


def _of_object(given: StructuredOutputs) -> StructuredOutputsParams:
    values = given.model_dump(by_alias=True)
    for name in ("json", "structural_tag"):
        if values[name] is not None:
            check_schema(f"structured_outputs.{name}", values[name])
    if values["json"] is False:
        values["json"] = {"not": {}}
    for name in CONSTRAINTS:
        if values[name] == "":
            raise RequestError(
                f"structured_outputs.{name} = '': must not be empty",
                param=f"structured_outputs.{name}",
            )
    return StructuredOutputsParams(**values)
