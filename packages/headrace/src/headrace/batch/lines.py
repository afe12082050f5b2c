"""The lines of a batch file, and those of its output."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace_core.errors import RequestError

MAX_LINE = 64 << 20
"""Bytes of one line."""
MAX_ID = 1024


class BatchLine(msgspec.Struct):
    """One request. Other fields are allowed, as OpenAI's files have them, and mean nothing."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchInput(NamedTuple):
    """What a look through the whole file found."""

    num_lines: int
    """Requests; blank lines are none."""
    digest: str
    """SHA-256 of the file."""


class BatchResponse(msgspec.Struct):
    """The answer to a request. ``body`` is null if there is an ``error``."""

    status_code: int
    request_id: str
    body: msgspec.Raw = msgspec.Raw(b"null")


class BatchError(msgspec.Struct):
    """Why a request was not answered."""

    message: str
    type: str
    param: str | None = None
    code: int = 400


class BatchOutput(msgspec.Struct):
    """One line of the output."""

    id: str
    custom_id: str
    response: BatchResponse
    error: BatchError | None = None


def scan(path: Path) -> BatchInput:
    """Check the form of every line, before anything is run.

    Raises:
        RequestError: a line is no request; says which and why. Or the file cannot be read.
    """
    digest = hashlib.sha256()
    count = 0
    for number, raw in _numbered(path):
        digest.update(raw)
        if raw.strip():
            read_line(number, raw)
            count += 1
    if not count:
        raise RequestError(f"{path.name}: holds no requests", param="input_file")
    return BatchInput(count, digest.hexdigest())


def requests(path: Path) -> Iterator[tuple[int, BatchLine]]:
    """(line number from 1, request) of every line that is not blank."""
    for number, raw in _numbered(path):
        if raw.strip():
            yield number, read_line(number, raw)


def read_line(number: int, raw: bytes) -> BatchLine:
    """Decode one line.

    Raises:
        RequestError: it is no JSON object with the fields of a request.
    """
    try:
        line = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        said = str(error) if isinstance(error, msgspec.DecodeError) else "is no JSON"
        raise RequestError(f"line {number}: {said}", param="input_file") from None
    if len(line.custom_id) > MAX_ID:
        raise RequestError(
            f"line {number}: custom_id is longer than {MAX_ID} characters", param="input_file"
        )
    return line


def output_of(
    line: BatchLine, status: int, request_id: str, body: bytes, error: BatchError | None = None
) -> BatchOutput:
    """The output line for an answer."""
    response = BatchResponse(status, request_id)
    if error is None:
        response.body = msgspec.Raw(body)
    return BatchOutput(f"batch_req_{uuid.uuid4().hex}", line.custom_id, response, error)


def failure(line: BatchLine, status: int, message: str, request_id: str = "") -> BatchOutput:
    """The output line for a request that was refused before it was run."""
    error = BatchError(message, "BadRequestError", code=status)
    return output_of(line, status, request_id, b"", error)


def error_of(status: int, body: bytes) -> BatchError:
    """The error that an answer's body describes."""
    try:
        described: Any = msgspec.json.decode(body)["error"]
        return msgspec.convert(described, BatchError)
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError):
        return BatchError(f"the request failed with status {status}", "APIError", code=status)


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(MAX_LINE + 1):
                number += 1
                if len(raw) > MAX_LINE:
                    raise RequestError(
                        f"line {number}: longer than {MAX_LINE} bytes", param="input_file"
                    )
                yield number, raw
    except OSError as error:
        raise RequestError(
            f"input_file {str(path)!r}: could not be read: {error.strerror}", param="input_file"
        ) from error


_decoder = msgspec.json.Decoder(BatchLine)
