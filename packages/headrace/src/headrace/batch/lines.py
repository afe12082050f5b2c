"""The lines of a batch file, and those of its output."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace_core.errors import RequestError

MAX_LINE = 64 << 20
"""Bytes of one line."""
MAX_ID = 1024
_OF_KIND = re.compile(r"^Expected `(\w+)`, got `(\w+)`(?: - at `\$\.(\w+)`)?")
_KINDS = {
    "str": "text", "int": "a number", "float": "a number", "bool": "true or false", "null": "null",
    "object": "an object", "array": "a list",
}  # fmt: skip
"""The decoder's names of kinds -> ours."""
BOM = b"\xef\xbb\xbf"
"""Byte order mark in UTF-8, which editors on Windows write at a file's beginning; ignored there."""


class BatchLine(msgspec.Struct):
    """One request. Other fields are allowed, as OpenAI's files have them, and mean nothing."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchInput(NamedTuple):
    """Result of a look through the whole file."""

    num_lines: int
    """Requests; blank lines are none."""
    digest: str
    """SHA-256 of the file."""
    repeated: Mapping[int, int] = {}
    """Number of each line whose custom_id an earlier line has -> number of the first such line."""


class BatchResponse(msgspec.Struct):
    """The answer to a request. ``body`` is null if the output has an ``error``."""

    status_code: int
    request_id: str
    body: msgspec.Raw = msgspec.Raw(b"null")


class BatchOutput(msgspec.Struct):
    """One line of the output."""

    id: str
    custom_id: str
    response: BatchResponse
    error: msgspec.Raw = msgspec.Raw(b"null")
    """As the body of the refusal has it."""
    failed: bool = False
    """Not part of the file."""


def scan(path: Path) -> BatchInput:
    """Check the form of every line, before anything is run.

    Raises:
        RequestError: a line is no request; says which and why. Or the file cannot be read.
    """
    digest = hashlib.sha256()
    count = 0
    first: dict[str, int] = {}
    repeated: dict[int, int] = {}
    for number, raw in _numbered(path):
        digest.update(raw)
        if raw.strip():
            name = read_line(number, raw).custom_id
            if first.setdefault(name, number) != number:
                repeated[number] = first[name]
            count += 1
    if not count:
        raise RequestError(f"{path.name}: holds no requests", param="input_file")
    return BatchInput(count, digest.hexdigest(), repeated)


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
    except RecursionError:
        raise RequestError(f"line {number}: {_too_deep(raw)}", param="input_file") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        said = _plain(str(error)) if isinstance(error, msgspec.DecodeError) else "is not valid JSON"
        raise RequestError(f"line {number}: {said}", param="input_file") from None
    if not line.custom_id:
        raise RequestError(
            f"line {number}: custom_id = '': must have at least one character", param="input_file"
        )
    if len(line.custom_id) > MAX_ID:
        raise RequestError(
            f"line {number}: custom_id is longer than {MAX_ID} characters", param="input_file"
        )
    return line


def _plain(message: str) -> str:
    """The decoder's message; of a value of another kind, its field and what it must be."""
    found = _OF_KIND.search(message)
    if found is None:
        return message
    wanted, given, field = found.groups()
    return f"{field or 'a request'}: must be {_KINDS.get(wanted, wanted)}, not {_KINDS.get(given, given)}"


def _too_deep(raw: bytes) -> str:
    """The refusal of a line that the decoder cannot follow to its depths; a body may have fewer levels."""
    from headrace_server.http.json_counts import nesting
    from headrace_server.http.routing import MAX_DEPTH

    return (
        f"is nested {nesting(raw)} levels deep; a body may have at most {MAX_DEPTH} levels of objects "
        "and lists"
    )


def output_of(line: BatchLine, status: int, request_id: str, body: bytes) -> BatchOutput:
    """The output line for an answer. Of an error's body only the error is kept."""
    name, response = f"batch_req_{uuid.uuid4().hex}", BatchResponse(status, request_id)
    if status >= 400:
        return BatchOutput(name, line.custom_id, response, _error_of(status, body), failed=True)
    response.body = msgspec.Raw(body)
    return BatchOutput(name, line.custom_id, response)


def encode(output: BatchOutput) -> bytes:
    """The line, without its end."""
    return msgspec.json.encode(
        {
            "id": output.id,
            "custom_id": output.custom_id,
            "response": output.response,
            "error": output.error,
        }
    )


def _error_of(status: int, body: bytes) -> msgspec.Raw:
    """The error that a body holds; one that says the status if it holds none (401, 404)."""
    try:
        found = msgspec.json.decode(body, type=_ErrorBody).error
        if bytes(found).startswith(b"{"):
            return found
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    said = {"message": f"the request failed with status {status}", "type": "APIError",
            "param": None, "code": status}  # fmt: skip
    return msgspec.Raw(msgspec.json.encode(said))


class _ErrorBody(msgspec.Struct):
    error: msgspec.Raw


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
                yield number, raw.removeprefix(BOM) if number == 1 else raw
    except OSError as error:
        raise RequestError(
            f"input_file {str(path)!r}: could not be read: {error.strerror}", param="input_file"
        ) from error


_decoder = msgspec.json.Decoder(BatchLine)
