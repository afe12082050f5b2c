"""The OpenAPI document: what FastAPI makes of the routes, corrected by what middleware does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from headrace_server.errors.mapping import ErrorResponse
from headrace_server.http.paths import OPEN_PATHS
from headrace_server.protocols.anthropic.protocol import MessageEvent
from headrace_server.protocols.openai.bodies.chat import ChatChunk, ChunkDelta
from headrace_server.protocols.openai.bodies.completions import CompletionChunk
from headrace_server.protocols.openai.bodies.generate import GenerateChunk
from headrace_server.protocols.openai.bodies.usage import Usage
from headrace_server.protocols.responses.protocol import ResponseEvent
from headrace_server.speech.protocol import SpeechChunk

EVENTS: tuple[type, ...] = (
    ChatChunk,
    CompletionChunk,
    GenerateChunk,
    SpeechChunk,
    ResponseEvent,
    MessageEvent,
)
"""Data of the events of streams: the schema of ``text/event-stream`` is that of one event."""
_CHAT_DELTA = "headrace_server.protocol.chat.ChunkDelta"
"""Published name of the schema of a chat's delta, which clients generated from the document have.
msgspec would name it by its module, because a transcript's delta has the same class name."""

_ERROR = {
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
}
_UNAUTHORIZED = {
    "description": "No key, or a wrong one.",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {"error": {"const": "Unauthorized"}},
                "required": ["error"],
            }
        }
    },
}
_BODY_ERRORS = {
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
}
_ALWAYS = {"431": "Too many header lines.", "503": "The server is shutting down."}


def install(
    app: FastAPI,
    *,
    has_keys: bool,
    narrow: bool,
    metrics_open: bool,
    inner: Callable[[], Sequence[FastAPI]] = lambda: (),
) -> None:
    """Make ``app.openapi`` tell the truth about errors and keys.

    Args:
        has_keys: whether any key is configured.
        narrow: only paths below ``/v1`` need one.
        metrics_open: ``/metrics`` needs none.
        inner: applications that answer what this one does not; their routes are told of, too.
    """
    opened = OPEN_PATHS | ({"/metrics"} if metrics_open else set())
    closed = set() if metrics_open else {"/metrics"}

    def needs_key(path: str) -> bool:
        if narrow:
            return has_keys and (path in closed or path.startswith("/v1"))
        return has_keys and path not in opened

    def make() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = _document(app)
            for other in inner():
                _add_document(document, _document(other))
            app.openapi_schema = _corrected(document, needs_key)
        return app.openapi_schema

    app.openapi = make  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    return get_openapi(
        title=app.title, version=app.version, routes=app.routes, servers=app.servers or None
    )


def _add_document(document: dict[str, Any], other: dict[str, Any]) -> None:
    """Add paths and schemas; those that are there already stay."""
    document["paths"] = other.get("paths", {}) | document.get("paths", {})
    components = document.setdefault("components", {})
    schemas = other.get("components", {}).get("schemas", {})
    components["schemas"] = schemas | components.get("schemas", {})


def _corrected(document: dict[str, Any], needs_key: Any) -> dict[str, Any]:
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    # The handlers answer 400 with our own body where FastAPI would answer 422 with its own.
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    _add_schema(schemas, ErrorResponse)
    _add_events(schemas, document.get("paths", {}))
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, methods in document.get("paths", {}).items():
        for operation in methods.values():
            responses = operation["responses"]
            if responses.pop("422", None) is not None:
                responses.setdefault("400", {"description": "The request is wrong.", **_ERROR})
            texts = {**_ALWAYS, **(_BODY_ERRORS if "requestBody" in operation else {})}
            if path not in OPEN_PATHS:
                for status, text in texts.items():
                    responses.setdefault(status, {"description": text, **_ERROR})
            if needs_key(path):
                responses["401"] = _UNAUTHORIZED
                operation["security"] = [{"key": []}]
    if not any("security" in o for m in document.get("paths", {}).values() for o in m.values()):
        del components["securitySchemes"]
    return document


def _add_schema(schemas: dict[str, Any], model: type[BaseModel]) -> None:
    made = model.model_json_schema(ref_template="#/components/schemas/{model}")
    for name, schema in made.pop("$defs", {}).items():
        schemas.setdefault(name, schema)
    schemas.setdefault(model.__name__, made)


def _add_events(schemas: dict[str, Any], paths: Any) -> None:
    """Schemas of the events of whatever streams there are."""
    wanted = set(_references(paths))
    structs = [event for event in EVENTS if issubclass(event, msgspec.Struct)]
    for event in EVENTS:
        if event.__name__ in wanted and issubclass(event, BaseModel):
            _add_schema(schemas, event)
    _, made = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    made = _renamed(made, f"{ChunkDelta.__module__}.{ChunkDelta.__qualname__}", _CHAT_DELTA)
    pending = [event.__name__ for event in structs if event.__name__ in wanted]
    if pending:
        _add_schema(schemas, Usage)
    while pending:
        name = pending.pop()
        if name in schemas:
            continue
        schemas[name] = schema = made[name]
        if name in wanted and "usage" in schema["properties"]:
            schema["properties"]["usage"] = {"$ref": "#/components/schemas/Usage"}
        pending += [found for found in _references(schema) if found in made]


def _renamed(schemas: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """The schemas with one of them, and all references to it, under another name."""
    text = msgspec.json.encode(schemas).decode()
    found: dict[str, Any] = msgspec.json.decode(
        text.replace(f'"{old}"', f'"{new}"').replace(f'schemas/{old}"', f'schemas/{new}"')
    )
    return found


def _references(value: Any) -> Iterator[str]:
    """Names of the schemas that a part of the document refers to."""
    if isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            yield reference.rpartition("/")[2]
        for held in value.values():
            yield from _references(held)
    elif isinstance(value, list):
        for held in value:
            yield from _references(held)
