"""Errors on the wire: one body, one table from exceptions to statuses, no foreign text.

Every message is our own (:mod:`headrace_core.errors`' request errors, or a sentence from here);
the text of any other exception goes to the log, under the request's id, never to a client. Whoever steers
the server by control routes is told, too, why weights or memory could not be had.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_core.errors import (
    BUG,
    EngineAsleep,
    EngineDead,
    GenerateError,
    HeadraceError,
    PromptTooLong,
    QueueFull,
    RequestError,
    UnknownModel,
    entry_of,
)
from headrace_server.errors import json_faults, places
from headrace_server.http.paths import route_path

logger = logging.getLogger(__name__)

TYPES: Mapping[int, str] = {
    400: "BadRequestError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
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
NO_ROUTE = "HR-REQ-010"
"""The catalogue's code for paths and methods that do not exist."""
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""OpenAI's code for what does not fit into the context; clients shorten the conversation then."""
_MAX_MESSAGE = 2000
_MAX_PATH = 200
_FIELD = re.compile(r"[a-z_][a-z0-9_.\[\]]{0,79}")
"""Names of fields as log lines show them."""


class ErrorInfo(BaseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None = None
    code: int | str
    """The HTTP status; ``context_length_exceeded`` where clients go by this word."""
    headrace_code: str | None = None
    """Stable; see docs/errors."""


class ErrorResponse(BaseModel):
    """Body of every error answer but 401."""

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


class ErrorAnswer(msgspec.Struct, frozen=True):
    """An exception as HTTP knows it."""

    status: int
    message: str
    param: str | None = None
    headers: dict[str, str] = {}
    headrace_code: str = ""
    """Code of the catalogue; empty: the status's own."""
    code: str = ""
    """A word that clients of OpenAI's API go by; empty: the status."""

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "APIError")
        message = self.message[:_MAX_MESSAGE]
        code = self.code or self.status
        reply = {"message": message, "type": kind, "param": self.param, "code": code}
        return {"error": reply | {"headrace_code": self.headrace_code or CODES.get(self.status)}}

    def response(self) -> Response:
        return JSONResponse(self.body(), self.status, dict(self.headers))

    def encoded(self) -> bytes:
        """The body as JSON bytes, for the middle of a stream."""
        return msgspec.json.encode(self.body())


def answer(error: BaseException) -> ErrorAnswer:
    """The answer that a client gets for an exception."""
    entry, reply = entry_of(error), _answer(error)
    # An unforeseen error keeps the code of its status, which says less. So does what the system refused
    # the server, which is not the client's fault.
    own = entry is BUG or isinstance(error, (OSError, UnicodeError))
    return reply if own else msgspec.structs.replace(reply, headrace_code=entry.code)


def _answer(error: BaseException) -> ErrorAnswer:
    match error:
        case UnknownModel():
            return ErrorAnswer(404, str(error), error.param or "model")
        case PromptTooLong():
            return ErrorAnswer(400, str(error), error.param, code=CONTEXT_LENGTH_EXCEEDED)
        case RequestError():
            return ErrorAnswer(400, str(error), error.param)
        case RequestValidationError():
            return _validation(error)
        case QueueFull():
            wait = str(max(1, math.ceil(error.retry_after)))
            return ErrorAnswer(
                429,
                f"the server accepts no more requests now; try again in {wait} s",
                headers={"Retry-After": wait},
            )
        case ShuttingDown():
            return ErrorAnswer(503, "the server is shutting down", headers={"Retry-After": "5"})
        case ClientGone():
            return ErrorAnswer(499, "the client closed the connection")
        case EngineAsleep():
            return ErrorAnswer(503, str(error))
        case GenerateError() if error.is_public:  # a second try may succeed
            return ErrorAnswer(503, str(error), headers={"Retry-After": "1"})
        case GenerateError():
            return ErrorAnswer(500, "the engine failed on this request; other requests go on")
        case EngineDead():
            return ErrorAnswer(500, "the engine has stopped; the server shuts down")
        case _:
            return ErrorAnswer(500, "internal error; the server's log has the details")


def report(error: BaseException, request_id: str = "") -> ErrorAnswer:
    """:func:`answer`, and a log line: a stack if the fault is ours; the field, not its content, if it
    is the client's."""
    reply = answer(error)
    if 400 <= reply.status < 500 and not isinstance(error, ClientGone):
        log_refused(reply, request_id, _reason(error, reply))
    if reply.status >= 500 and not isinstance(error, (ShuttingDown, EngineAsleep)):
        expected = isinstance(error, (GenerateError, EngineDead))
        logger.error(
            "request %s failed: %s: %s",
            request_id or "(no id)",
            type(error).__name__,
            error,
            exc_info=None if expected else error,
        )
    return reply


def report_named(error: HeadraceError, request_id: str = "") -> ErrorAnswer:
    """:func:`report`, for those who steer the server: they are told the cause, whatever it is."""
    reply = report(error, request_id)
    return msgspec.structs.replace(
        reply, message=str(error), headrace_code=entry_of(error).code or reply.headrace_code
    )


def log_refused(reply: ErrorAnswer, request_id: str, reason: str = "") -> None:
    """Log why a request was refused.

    Args:
        reason: holds nothing that the request brought; empty: the answer's own words, which then hold
            nothing of it either.
    """
    code = reply.headrace_code or CODES.get(reply.status, "")
    logger.info(
        "request %s refused: %s (%s)",
        request_id or "(no id)",
        f"{reply.status} {code}".rstrip(),
        reason or reply.message,
    )


def _reason(error: BaseException, reply: ErrorAnswer) -> str:
    """Why a request was refused, in words that hold nothing which it brought: a message may quote it."""
    where = (reply.param or "").split("\n")[0]
    if isinstance(error, RequestValidationError):
        kinds = [str(problem["type"]) for problem in error.errors()[:3]]
        return ", ".join([where, *kinds] if _FIELD.fullmatch(where) else kinds)
    field = f", {where}" if _FIELD.fullmatch(where) else ""
    return type(error).__name__ + field


class AnswerErrors:
    """ASGI middleware: answers what nothing further in has handled, and logs it once.

    The framework's own answer to it would go past the middleware that stands further out (request ids,
    other protocols' error bodies), and the server would log the stack a second time.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send_and_note)
        except Exception as error:
            reply = report(error, scope.get("headrace_request_id", ""))
            if not started:  # else the server closes the connection, before the answer's end
                await reply.response()(scope, receive, send)


def install(app: FastAPI, *, stacks: bool = False) -> None:
    """Register the handlers.

    Args:
        stacks: log the stack of error answers, not only of unexpected ones; but of a dead engine no more
            than the line that each of its requests gets.
    """
    app.add_middleware(AnswerErrors)

    async def handle(request: Request, error: Exception) -> Response:
        if (undecoded := _undecoded(request, error)) is not None:
            return await _http_exception(request, undecoded)
        request_id = request.scope.get("headrace_request_id", "")
        reply = report(error, request_id)
        if stacks and not isinstance(error, (RequestValidationError, EngineDead)):
            logger.info("request %s: answer %d", request_id, reply.status, exc_info=error)
        return reply.response()

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


def _undecoded(request: Request, error: Exception) -> BodyRefused | None:
    """The refusal of a body that the framework could not decode, in the words of those that
    :mod:`headrace_server.http.routing` decodes; None: that was not why."""
    framework = isinstance(error, (HTTPException, RequestValidationError))
    if not framework or isinstance(error, BodyRefused):
        return None
    if "json" not in request.headers.get("content-type", "").lower():  # a form, say
        return None
    cause = error.__cause__
    match cause:
        case UnicodeDecodeError():
            body = bytes(cause.object)
        case json.JSONDecodeError():
            body = cause.doc.encode(errors="surrogatepass")
        case RecursionError():
            body = b""
        case _:
            return None
    why: Exception = cause
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as told:
        why = why if isinstance(why, RecursionError) else told
    return BodyRefused("HR-REQ-006", f"the body is not valid JSON: {json_faults.reason(body, why)}")


async def _http_exception(request: Request, error: Exception) -> Response:
    """The framework's own refusals: unknown routes, wrong methods, bodies that are not read."""
    assert isinstance(error, HTTPException)
    error = _undecoded(request, error) or error
    headers = dict(error.headers or {})
    if error.status_code == 404:
        reply = ErrorAnswer(404, unknown_path(request), headers=headers, headrace_code=NO_ROUTE)
        return reply.response()
    if error.status_code == 405:
        allowed = ", ".join(sorted(headers.get("allow", headers.get("Allow", "")).split(", ")))
        message = f"{request.url.path[:_MAX_PATH]} does not take {request.method[:16]}"
        return ErrorAnswer(405, f"{message}; it takes {allowed}" if allowed else message,
                      headers=headers, headrace_code=NO_ROUTE).response()  # fmt: skip
    code = error.headrace_code if isinstance(error, BodyRefused) else ""
    reply = ErrorAnswer(error.status_code, str(error.detail), headers=headers, headrace_code=code)
    # What stands behind a colon may be a library's word for a part of the body.
    reason = reply.message.partition(":")[0]
    log_refused(reply, request.scope.get("headrace_request_id", ""), reason)
    return reply.response()


def unknown_path(request: Request) -> str:
    """The message for a path that no route has."""
    path = route_path(request.scope)
    served: set[str] = request.app.state.headrace.paths
    message = f"there is no {path[:_MAX_PATH]} here"
    candidates = ["/v1" + path, path.removeprefix("/v1"), path.rstrip("/"), _after_v1(path)]
    found = next((one for one in candidates if one != path and one in served), None)
    if found is None:
        near = difflib.get_close_matches(path[:_MAX_PATH], sorted(served), n=1, cutoff=0.8)
        found = near[0] if near else None
    if found is not None:
        return f"{message}; did you mean {found}?"
    return f"{message}; the API is below /v1, GET / lists the paths"


def _after_v1(path: str) -> str:
    """The path from its last ``/v1`` on: bases that clients put twice, or below a prefix."""
    return "/v1" + path.rpartition("/v1")[2]


def _validation(error: RequestValidationError) -> ErrorAnswer:
    problems = places.told(error.errors(), error.body)
    lines = [f"{where or 'body'}: {message}" for where, message in problems[:3]]
    if len(problems) > 3:
        lines.append(f"and {len(problems) - 3} more")
    param = next((where for where, _ in problems if where), None)
    return ErrorAnswer(400, "; ".join(lines), param)
