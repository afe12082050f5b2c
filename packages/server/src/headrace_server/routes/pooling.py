"""``/v1/embeddings``, ``/v2/embed``, ``/classify``, ``/score``, ``/rerank`` and ``/pooling``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from headrace_core.engine import EngineClient
from headrace_server.http.routing import ERROR_RESPONSES, json_router
from headrace_server.pooling.call import answer_pooled
from headrace_server.pooling.classify import Classification
from headrace_server.pooling.embeddings import Vectors, pooling_task
from headrace_server.pooling.plugin import PluginCall
from headrace_server.pooling.scores import Rerank, Score
from headrace_server.protocols.cohere.answer import CohereEmbedding
from headrace_server.protocols.cohere.protocol import (
    CohereEmbedRequest,
    CohereEmbedResponse,
    CohereErrorResponse,
)
from headrace_server.protocols.openai.bodies.pooling import (
    ClassifyRequest,
    ClassifyResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PluginRequest,
    PluginResponse,
    PoolingRequest,
    PoolingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from headrace_server.routes.availability import INFERENCE_ROUTES, can_score
from headrace_server.settings import ServerSettings
from headrace_server.state import state_for

logger = logging.getLogger(__name__)

_NOT_OPENAIS = ("/v1/score", "/v1/rerank")
_BINARY: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The vectors; with encoding_format bytes or bytes_only, one behind the other.",
        "content": {"application/octet-stream": {"schema": {"type": "string"}}},
        "headers": {
            "metadata": {
                "description": "With encoding_format bytes: JSON with the position of each vector.",
                "schema": {"type": "string"},
            }
        },
    }
}


COHERE_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**told, "model": CohereErrorResponse} for status, told in ERROR_RESPONSES.items()
}


class EmbeddingsRouter:
    """Vectors, as OpenAI's and Cohere's clients ask for them."""

    name = "embeddings"
    tasks: Sequence[str] = INFERENCE_ROUTES["/v1/embeddings"].tasks

    def build(self, engine: EngineClient, settings: ServerSettings) -> APIRouter:
        router = json_router()

        @router.post("/v1/embeddings", response_model=EmbeddingResponse, responses=_BINARY)
        async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
            state = await state_for(request, body.model)
            return await answer_pooled(Vectors(body, request, state), request)

        @router.post("/v2/embed", response_model=CohereEmbedResponse, responses=COHERE_ERRORS)
        async def embed(body: CohereEmbedRequest, request: Request) -> Response:
            state = await state_for(request, body.model)
            return await answer_pooled(CohereEmbedding(body, request, state), request)

        return router


class ClassifyRouter:
    """Labels and their probabilities."""

    name = "classify"
    tasks: Sequence[str] = INFERENCE_ROUTES["/classify"].tasks

    def build(self, engine: EngineClient, settings: ServerSettings) -> APIRouter:
        router = json_router()

        @router.post("/classify", response_model=ClassifyResponse)
        async def classify(body: ClassifyRequest, request: Request) -> Response:
            state = await state_for(request, body.model)
            return await answer_pooled(Classification(body, request, state), request)

        return router


class ScoreRouter:
    """Scores of pairs, and ranks of documents for a query (Jina's and Cohere's routes)."""

    name = "score"
    tasks: Sequence[str] = INFERENCE_ROUTES["/score"].tasks

    def build(self, engine: EngineClient, settings: ServerSettings) -> APIRouter:
        router = json_router()
        if not can_score(engine.model):
            return router

        async def score(body: ScoreRequest, request: Request) -> Response:
            state = await state_for(request, body.model)
            return await answer_pooled(Score(body, request, state), request)

        async def rerank(body: RerankRequest, request: Request) -> Response:
            state = await state_for(request, body.model)
            return await answer_pooled(Rerank(body, request, state), request)

        for path in ("/score", "/v1/score"):
            router.post(path, response_model=ScoreResponse)(score)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            router.post(path, response_model=RerankResponse)(rerank)
        logger.info("%s are not routes of OpenAI's", " and ".join(_NOT_OPENAIS))
        return router


class PoolingRouter:
    """Pooled results of any task, or what an IO processor makes of them."""

    name = "pooling"
    tasks: Sequence[str] = INFERENCE_ROUTES["/pooling"].tasks

    def build(self, engine: EngineClient, settings: ServerSettings) -> APIRouter:
        router = json_router()

        @router.post("/pooling", response_model=PoolingResponse | PluginResponse, responses=_BINARY)
        async def pooling(body: PoolingRequest, request: Request) -> Response:
            state = await state_for(request, body.model)
            if isinstance(body, PluginRequest):
                return await answer_pooled(PluginCall(body, request, state), request)
            task = pooling_task(body.task, state.engine.model.tasks)
            call = Vectors(
                body, request, state, task=task, prefix="pool-", kind="pooling", key="data"
            )
            return await answer_pooled(call, request)

        return router


EMBEDDINGS = EmbeddingsRouter()
CLASSIFY = ClassifyRouter()
SCORE = ScoreRouter()
POOLING = PoolingRouter()
