"""Reading a form with a file: bounded before and while it is read, spooled to disk beyond 1 MiB."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from python_multipart.exceptions import FormParserError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from headrace_core.errors import RequestError
from headrace_server.errors.mapping import BodyRefused, ClientGone
from headrace_server.speech.protocol import JSON_FIELDS, LISTS, SpeechRequest

MAX_FIELDS = 64
MAX_FIELD_BYTES = 1 << 20
OVERHEAD = 2 << 20
"""Bytes that a form may take beyond its file."""

Body = TypeVar("Body", bound=SpeechRequest)


class Upload(NamedTuple):
    """Contents of an upload form."""

    name: str
    """Name of the file, as the client calls it; may be anything."""
    data: bytes
    fields: dict[str, Any]


async def read_upload(request: Request, max_file_bytes: int) -> Upload:
    """Read a request's form.

    Raises:
        RequestError: there is no file, it is too large, or a field is sent twice.
        HTTPException: the body is no form.
        ClientGone: the client left before its end.
    """
    declared = request.headers.get("content-type", "").partition(";")[0]
    if declared.strip().lower() != "multipart/form-data":
        raise BodyRefused(
            "HR-REQ-007", "Content-Type must be multipart/form-data; nothing else is read"
        )
    bounded = _bounded(request, max_file_bytes)
    try:
        form = await bounded.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES)
    except ClientDisconnect as error:
        raise ClientGone from error
    except FormParserError as error:  # of some versions of the parser, past the framework
        raise HTTPException(400, f"the form cannot be read: {error}") from error
    try:
        return await _upload(form, max_file_bytes)
    finally:
        await form.close()


async def _upload(form: FormData, max_file_bytes: int) -> Upload:
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise RequestError("file: must be a file of the form", param="file")
    if (file.size or 0) > max_file_bytes:
        raise _too_large(max_file_bytes, file.size or 0)
    return Upload(file.filename or "", await file.read(), _fields(form.multi_items()))


def _bounded(request: Request, max_file_bytes: int) -> Request:
    """The request, whose body ends in an error where no file that is taken can be so long."""
    most = max_file_bytes + OVERHEAD
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > most:
        raise _too_large(max_file_bytes)
    seen = 0

    async def receive() -> Message:
        nonlocal seen
        message = await request.receive()
        seen += len(message.get("body", b""))
        if seen > most:
            raise _too_large(max_file_bytes)
        return message

    return Request(request.scope, receive)


def _too_large(most: int, size: int = 0) -> RequestError:
    found = f"{size} bytes" if size else "too large"
    return RequestError(
        f"file: {found}; at most {most} bytes ({most / (1 << 20):g} MiB) are taken", param="file"
    )


def _fields(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """A form's fields but for the file; empty ones are left out, lists and JSON made what they are."""
    fields: dict[str, Any] = {}
    for name, value in items:
        if isinstance(value, UploadFile):
            if name != "file":
                raise RequestError(f"{name[:64]!r}: must not be a file", param=name[:64])
        elif name in LISTS:
            fields.setdefault(name, []).append(value)
        elif name in fields:
            raise RequestError(f"{name[:64]!r}: sent twice", param=name[:64])
        elif value:
            fields[name] = _json(name, value) if name in JSON_FIELDS else value
    return fields


def _json(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{name}: must be JSON", param=name) from error


def body_of(kind: type[Body], upload: Upload) -> Body:
    """A form's fields as a request.

    Raises:
        RequestValidationError: naming the fields that are wrong.
    """
    try:
        return kind.model_validate(upload.fields)
    except ValidationError as error:
        problems = [{**p, "loc": ("body", *p["loc"])} for p in error.errors()]
        raise RequestValidationError(problems) from error
