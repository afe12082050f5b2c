"""``POST /v1/audio/transcriptions`` and ``POST /v1/audio/translations``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from starlette.responses import PlainTextResponse

from headrace_core.engine import EngineClient
from headrace_core.errors import RequestError
from headrace_core.speech.model import SpeechTask
from headrace_server.http.routing import ERROR_RESPONSES, JsonAnswer, encode_answer, respell
from headrace_server.settings import ServerSettings
from headrace_server.speech.protocol import (
    SpeechRequest,
    Transcription,
    TranscriptionRequest,
    TranslationRequest,
    VerboseTranscription,
)
from headrace_server.speech.run import SpeechCall
from headrace_server.speech.upload import body_of, read_upload
from headrace_server.state import ServerState, state_for, state_of
from headrace_server.streaming.event_stream import start_stream, wait_watching

_TEXTS = {"text": "text/plain", "srt": "text/plain", "vtt": "text/vtt"}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "model": Transcription | VerboseTranscription,
        "description": "The text; with stream, server-sent events that end with [DONE].",
        "content": {
            **{kind: {"schema": {"type": "string"}} for kind in ("text/plain", "text/vtt")},
            "text/event-stream": {"schema": {"$ref": "#/components/schemas/SpeechChunk"}},
        },
    }
}


class SpeechRouter:
    """Speech to text as OpenAI's clients ask for it."""

    name = "speech"
    tasks: Sequence[str] = ("transcription",)

    def build(self, engine: EngineClient, settings: ServerSettings) -> APIRouter:
        router = APIRouter(responses=ERROR_RESPONSES)

        @router.post(
            "/v1/audio/transcriptions",
            response_model=None,
            responses=_ANSWERS,
            openapi_extra=_form_of(TranscriptionRequest),
        )
        async def transcriptions(request: Request) -> Response:
            return await _answer(TranscriptionRequest, "transcribe", request)

        @router.post(
            "/v1/audio/translations",
            response_model=None,
            responses=_ANSWERS,
            openapi_extra=_form_of(TranslationRequest),
        )
        async def translations(request: Request) -> Response:
            return await _answer(TranslationRequest, "translate", request)

        return router


async def _answer(kind: type[SpeechRequest], task: SpeechTask, request: Request) -> Response:
    state = state_of(request)
    try:
        call = await _call(kind, task, request, state)
        if call.body.stream:
            return await start_stream(call.events(), request, call.state, call.id)
        result = await wait_watching(call.whole(), request, state.lifecycle, call.id)
    except RequestError as error:
        respell(error, SpeechCall.spelling)
        raise
    if isinstance(result, BaseModel):
        return JsonAnswer(encode_answer(result))
    return PlainTextResponse(result, media_type=_TEXTS[call.body.response_format])


async def _call(
    kind: type[SpeechRequest], task: SpeechTask, request: Request, state: ServerState
) -> SpeechCall:
    """Parameters of a request. The file belongs to the call, which drops it once it is decoded."""
    speech = state.engine.speech
    assert speech is not None, "an engine whose model transcribes has a speech model"
    upload = await read_upload(request, speech.max_file_bytes)
    body = body_of(kind, upload)
    return SpeechCall(body, upload, task, request, await state_for(request, body.model))


def _form_of(kind: type[SpeechRequest]) -> dict[str, Any]:
    """A route's form for the OpenAPI document."""
    schema = kind.model_json_schema()
    schema["properties"] = {
        "file": {"type": "string", "format": "binary", "description": "The audio."},
        **schema["properties"],
    }
    schema["required"] = ["file"]
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


ROUTER = SpeechRouter()
