"""Log lines of requests and outputs (``--enable-log-requests``, ``--enable-log-outputs``)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_core.arrays import PackedArray
from headrace_core.output import (
    CompletionOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from headrace_core.pooling import PoolingParams
from headrace_core.request import ChatPrompt, Prompt
from headrace_core.sampling.params import RequestOutputKind, SamplingParams
from headrace_server.observability.sse_reader import EventDecoder
from headrace_server.state import ServerState

logger = logging.getLogger(__name__)

_EVENTS = b"text/event-stream"
_MAX_RESPONSE = 1 << 16
_NUMBERS = 4
"""Numbers of a vector that are shown."""


def log_request(
    state: ServerState,
    request_id: str,
    params: SamplingParams | PoolingParams,
    prompt: Prompt,
) -> None:
    """Id, parameters and adapter at INFO, the prompt at DEBUG, cut to ``max_log_len``."""
    settings = state.settings
    if not settings.enable_log_requests:
        return
    extra = {"request_id": request_id}
    logger.info("request %s: %s%s", request_id, params, _adapter_of(state), extra=extra)
    if logger.isEnabledFor(logging.DEBUG):
        shown = _shown(prompt, settings.max_log_len)
        logger.debug("request %s: prompt %r", request_id, shown, extra=extra)


def _adapter_of(state: ServerState) -> str:
    adapter = state.adapter
    return "" if adapter is None else f", adapter {adapter.lora_name!r} (id {adapter.lora_int_id})"


class OutputLog:
    """A :class:`~headrace_server.observability.instrumentation.Watcher` that logs each output: of
    streams every delta and the whole at the end, of other requests the whole, of vectors their beginning.

    Args:
        limit: most characters and token ids shown; None: all.
    """

    every_output = True

    def __init__(self, limit: int | None) -> None:
        self._limit = limit

    def begin(self, prompt: Prompt, params: SamplingParams, request_id: str) -> _LoggedRequest:
        return _LoggedRequest(
            request_id, self._limit, params.output_kind is RequestOutputKind.DELTA
        )

    def begin_pooling(self, task: str, request_id: str) -> _LoggedPooling:
        return _LoggedPooling(task, request_id)


class _LoggedPooling:
    """Log the result of one pooling request, or of the pairs of one call."""

    def __init__(self, task: str, request_id: str) -> None:
        self._task = task
        self._request_id = request_id

    def ended(
        self, outputs: Sequence[PoolingRequestOutput[Any]], error: BaseException | None
    ) -> None:
        for output in outputs:
            logger.info(
                "output %s (%s): %s, %d prompt tokens", self._request_id, self._task,
                _numbers(output.outputs), len(output.prompt_token_ids),
                extra={"request_id": self._request_id},
            )  # fmt: skip


class _LoggedRequest:
    """One request's outputs."""

    def __init__(self, request_id: str, limit: int | None, streams: bool) -> None:
        self._request_id = request_id
        self._limit = limit
        self._streams = streams
        self._whole: dict[int, tuple[str, list[int]]] = {}

    def saw(self, output: RequestOutput) -> None:
        for part in output.outputs:
            text, ids = part.text, part.token_ids
            if self._streams:
                self._line("delta", part, text, ids)
                before_text, before_ids = self._whole.get(part.index, ("", []))
                text, ids = self._cut(before_text + text), self._cut([*before_ids, *ids])
                self._whole[part.index] = (text, ids)
            if part.finish_reason is not None:
                self._line("complete", part, text, ids)

    def ended(self, error: BaseException | None) -> None:
        """Log nothing: the error is in the log already."""

    def _line(self, tag: str, part: CompletionOutput, text: str, ids: list[int]) -> None:
        logger.info(
            "output %s[%d] (%s): text %r, token ids %s, finish reason %s",
            self._request_id, part.index, tag, self._cut(text), self._cut(ids),
            part.finish_reason, extra={"request_id": self._request_id},
        )  # fmt: skip

    def _cut(self, given: Any) -> Any:
        return given if self._limit is None else given[: self._limit]


class ResponseLog:
    """ASGI middleware: the body of each answer as a log line; of an event stream its text.

    Args:
        limit: most characters shown; None: 64 KiB.
    """

    def __init__(self, app: ASGIApp, limit: int | None) -> None:
        self._app = app
        self._limit = _MAX_RESPONSE if limit is None else limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope.get("headrace_request_id", "")
        decoder: EventDecoder | None = None
        body, status = b"", 0

        async def look(message: Message) -> None:
            nonlocal decoder, body, status
            if message["type"] == "http.response.start":
                status = message["status"]
                kind = next((v for k, v in message["headers"] if k == b"content-type"), b"")
                decoder = EventDecoder(self._limit) if kind.startswith(_EVENTS) else None
            elif decoder is not None:
                decoder.feed(message.get("body", b""))
            else:
                body += message.get("body", b"")[: max(0, 4 * self._limit - len(body))]
            await send(message)

        try:
            await self._app(scope, receive, look)
        finally:
            text = decoder.text if decoder is not None else body.decode("utf-8", "replace")
            logger.info(
                "response of %s: %d %r", request_id, status, text[: self._limit],
                extra={"request_id": request_id},
            )  # fmt: skip


def _numbers(outputs: Any) -> str:
    """A score, or the shape of an array and its first numbers."""
    if isinstance(outputs, ScoringOutput):
        return f"score {outputs.score:.6g}"
    array: PackedArray = outputs.data
    first = memoryview(array.data).cast("f")[:_NUMBERS].tolist()
    return f"{list(array.shape)} numbers {[float(f'{number:.6g}') for number in first]}"


def _shown(prompt: Prompt, limit: int | None) -> Any:
    if isinstance(prompt, ChatPrompt):
        return str(list(prompt.messages))[:limit]
    if isinstance(prompt, Mapping):
        decoder: Any = prompt.get("decoder_prompt")
        if decoder is not None:
            return _shown(decoder, limit)
        given: Any = prompt.get("prompt") or prompt.get("prompt_token_ids") or ""
        return given[:limit]
    return prompt[:limit]
