"""Errors on the wire: one body, one table from exceptions to statuses, no foreign text.

Every message is our own (:mod:`headrace_core.errors`' request errors, or a sentence from here);
the text of any other exception goes to the log, under the request's id, never to a client.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace_core.catalogue import BUG, entry_of
from headrace_core.errors import (
    EngineDead,
    GenerateError,
    QueueFull,
    RequestError,
    UnknownModel,
)

logger = logging.getLogger(__name__)

TYPES: Mapping[int, str] = {
    400: "BadRequestError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "BadRequestError",
    409: "ConflictError",
    413: "BadRequestError",
    415: "BadRequestError",
    429: "RateLimitError",
    431: "BadRequestError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
CODES: Mapping[int, str] = {
    400: "HR-REQ-001", 404: "HR-REQ-004", 413: "HR-REQ-008", 429: "HR-QUE-001",
    431: "HR-REQ-009", 499: "HR-REQ-012", 500: "HR-SRV-002", 503: "HR-SRV-001",
}  # fmt: skip
"""The catalogue's code for answers that no exception stands behind."""
_MAX_MESSAGE = 2000


class ErrorInfo(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: int
    headrace_code: str | None = None
    """Stable; see docs/errors."""


class ErrorResponse(BaseModel):
    """Body of every error answer but 401 and unknown routes."""

    error: ErrorInfo


class ShuttingDown(Exception):
    """The server stops before this request could finish."""


class ClientGone(Exception):
    """The client closed the connection; nobody reads what we answer."""


class BodyRefused(HTTPException):
    """A body is refused before it is parsed, with a code of its own.

    Args:
        headrace_code: of the catalogue.
        message: for the client.
    """

    def __init__(self, headrace_code: str, message: str) -> None:
        super().__init__(400, message)
        self.headrace_code = headrace_code


class Answer(msgspec.Struct, frozen=True):
    """An exception as HTTP knows it."""

    status: int
    message: str
    param: str | None = None
    headers: dict[str, str] = {}
    headrace_code: str = ""
    """Of the catalogue; empty: the status's own."""

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "APIError")
        message = self.message[:_MAX_MESSAGE]
        told = {"message": message, "type": kind, "param": self.param, "code": self.status}
        return {"error": told | {"headrace_code": self.headrace_code or CODES.get(self.status)}}

    def response(self) -> Response:
        return JSONResponse(self.body(), self.status, dict(self.headers))

    def encoded(self) -> bytes:
        """The body as JSON bytes, for the middle of a stream."""
        return msgspec.json.encode(self.body())


def answer(error: BaseException) -> Answer:
    """What a client is told about an exception."""
    entry, told = entry_of(error), _answer(error)
    # What nobody foresaw keeps the code of its status, which says less.
    return told if entry is BUG else msgspec.structs.replace(told, headrace_code=entry.code)


def _answer(error: BaseException) -> Answer:
    match error:
        case UnknownModel():
            return Answer(404, str(error), error.param or "model")
        case RequestError():
            return Answer(400, str(error), error.param)
        case RequestValidationError():
            return _validation(error.errors())
        case QueueFull():
            wait = str(max(1, math.ceil(error.retry_after)))
            return Answer(
                429,
                f"the server takes no more requests now; try again in {wait} s",
                headers={"Retry-After": wait},
            )
        case ShuttingDown():
            return Answer(503, "the server is shutting down", headers={"Retry-After": "5"})
        case ClientGone():
            return Answer(499, "the client closed the connection")
        case GenerateError():
            return Answer(500, "the engine failed on this request; other requests go on")
        case EngineDead():
            return Answer(500, "the engine has stopped; the server shuts down")
        case _:
            return Answer(500, "internal error; the server's log has the details")


def report(error: BaseException, request_id: str = "") -> Answer:
    """:func:`answer`, and a log line if the fault is ours."""
    told = answer(error)
    if told.status >= 500 and not isinstance(error, ShuttingDown):
        expected = isinstance(error, (GenerateError, EngineDead))
        logger.error(
            "request %s failed: %s: %s",
            request_id or "(no id)",
            type(error).__name__,
            error,
            exc_info=None if expected else error,
        )
    return told


def install(app: FastAPI, *, stacks: bool = False) -> None:
    """Register the handlers.

    Args:
        stacks: log the stack of every error answer, not only of unexpected ones.
    """

    async def handle(request: Request, error: Exception) -> Response:
        request_id = request.scope.get("headrace_request_id", "")
        told = report(error, request_id)
        if stacks and not isinstance(error, RequestValidationError):
            logger.info("request %s: answer %d", request_id, told.status, exc_info=error)
        return told.response()

    for kind in (
        RequestError,
        RequestValidationError,
        QueueFull,
        GenerateError,
        EngineDead,
        ShuttingDown,
        ClientGone,
        Exception,
    ):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(HTTPException, _http_exception)


async def _http_exception(request: Request, error: Exception) -> Response:
    """The framework's own refusals: unknown routes and methods keep its ``detail`` body."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code in (404, 405):
        return JSONResponse({"detail": error.detail}, error.status_code, headers)
    code = error.headrace_code if isinstance(error, BodyRefused) else ""
    told = Answer(error.status_code, str(error.detail), headers=headers, headrace_code=code)
    return told.response()


def _validation(problems: Sequence[Any]) -> Answer:
    lines, param = [], None
    for problem in problems[:3]:
        where = _field_path(problem["loc"])
        param = param or where
        lines.append(f"{where or 'body'}: {problem['msg']}")
    if len(problems) > 3:
        lines.append(f"and {len(problems) - 3} more")
    return Answer(400, "; ".join(lines), param)


def _field_path(location: Sequence[str | int]) -> str | None:
    """``messages[0].content`` from pydantic's location; names of union members are left out. A form's
    field that may be sent several times, ``temperature[]``, is named as it is sent."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += "" if path.endswith("[]") else f"[{part}]"
        elif part.removesuffix("[]").isidentifier() and part not in _UNION_MEMBERS:
            path += f".{part}" if path else part
    return path or None


_UNION_MEMBERS = frozenset({"str", "int", "float", "bool", "list", "dict"})
