"""One call of ``/pooling`` with ``data``: an IO processor makes prompts of it and an answer of what
comes of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from headrace_core.errors import HeadraceError, RequestError, UnsupportedFeature
from headrace_core.pooling.io_processor import IOProcessor
from headrace_server.http.routing import JsonAnswer
from headrace_server.protocols.openai.bodies.pooling import PluginRequest
from headrace_server.requests import convert
from headrace_server.state import ServerState


class PluginCall:
    """Checks a request when made; then :meth:`respond`, once.

    Raises:
        RequestError: naming the field, or with the text of what the plug-in raised.
    """

    spelling: Mapping[str, str] = {}

    def __init__(self, body: PluginRequest, request: Request, state: ServerState) -> None:
        self.state = state
        engine = state.engine
        convert.check_model(body.model, engine.model)
        body.check_fields(state)
        convert.choose_engine(request, engine)
        convert.check_priority(body.priority, engine.model)
        self._wanted_id = convert.answer_id("", body.request_id, request)
        self.id = f"pool-{self._wanted_id}"
        self._created = int(time.time())
        self._priority = body.priority
        processor = engine.io_processor
        if processor is None:
            raise UnsupportedFeature(
                "data: this server has no IO processor (--io-processor-plugin)", param="data"
            )
        self._processor = processor
        self._prompt = _parsed(processor, body.data)

    async def respond(self) -> Response:
        name = convert.engine_id(self.id, 0)
        output = await self.state.engine.answer_plugin(
            self._prompt, None, name, priority=self._priority
        )
        told = self._processor.output_to_response(output)
        body = {
            "request_id": told.request_id or self._wanted_id,
            "created_at": self._created,
            "data": told.data,
            **told.extra,
        }
        return JsonAnswer(msgspec.json.encode(body))


def _parsed(processor: IOProcessor, data: Any) -> Any:
    """The plug-in's own form of a request's data. What goes wrong there is the client's fault."""
    try:
        return processor.parse_request(data)
    except HeadraceError:
        raise
    except Exception as error:
        raise RequestError(f"data: {error}", param="data") from error
