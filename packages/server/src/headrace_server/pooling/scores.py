"""Calls of ``/score`` and ``/rerank``: how well texts fit each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from headrace_core.errors import RequestError
from headrace_core.output import PoolingRequestOutput, ScoringOutput
from headrace_core.pooling.scoring import ScoreInput, pair_up
from headrace_server.http.routing import JsonAnswer, respell
from headrace_server.pooling.call import PARALLEL, PoolingCall
from headrace_server.pooling.inputs import document_text, query_of, sides_of
from headrace_server.protocols.openai.bodies.pooling import (
    PoolingBody,
    RerankRequest,
    ScoreRequest,
)
from headrace_server.requests import convert
from headrace_server.requests.bounded_gather import in_order
from headrace_server.state import ServerState
from headrace_server.streaming.offload import encoded

Outputs = Sequence[PoolingRequestOutput[ScoringOutput]]


class _Scoring(PoolingCall):
    """A call that has pairs scored."""

    def __init__(
        self, body: PoolingBody, request: Request, state: ServerState, prefix: str
    ) -> None:
        super().__init__(body, request, state, prefix)
        pooling = self.model.pooling
        by_template = pooling is not None and pooling.scoring == "cross"
        self._template = state.chat_template if by_template else None

    async def score(
        self, data_1: Sequence[ScoreInput], data_2: Sequence[ScoreInput]
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """The results of all pairs, in order."""
        try:
            return await self.state.engine.score(
                data_1,
                data_2,
                self.params,
                convert.engine_id(self.id, 0),
                priority=self._priority,
                chat_template=self._template,
            )
        except RequestError as error:
            _respell_part(error, self.spelling)
            raise


def _respell_part(error: RequestError, spelling: Mapping[str, str]) -> None:
    """Name a part of a side (``text_2[1].content[0].image_url.url``) as the client spells the side."""
    ours = error.param or ""
    for side in ("text_1", "text_2"):
        if ours.startswith((f"{side}.", f"{side}[")):
            respell(error, {ours: spelling.get(side, side) + ours.removeprefix(side)})


class Score(_Scoring):
    """Checks a request when made; then :meth:`respond`, once.

    Raises:
        RequestError: naming the field.
    """

    def __init__(self, body: ScoreRequest, request: Request, state: ServerState) -> None:
        super().__init__(body, request, state, "score-")
        taken = self.model.modalities
        self._data_1, name_1 = _side(body, taken, "text_1", "queries")
        self._data_2, name_2 = _side(body, taken, "text_2", "documents")
        self.spelling: Mapping[str, str] = {
            "text_1": name_1, "text_2": name_2, "prompt": name_2, "prompt_token_ids": name_2,
        }  # fmt: skip
        try:
            pair_up(self._data_1, self._data_2)
        except RequestError as error:
            error.param = self.spelling.get(error.param or "", error.param)
            raise

    async def respond(self) -> Response:
        outputs = await self.score(self._data_1, self._data_2)
        return self.list_of(self._items(outputs), outputs, len(outputs))

    def _items(self, outputs: Outputs) -> Iterator[dict[str, Any]]:
        for index, output in enumerate(outputs):
            item = {"index": index, "object": "score", "score": output.outputs.score}
            yield item | self.ids_of(output)


def _side(
    body: ScoreRequest, modalities: Sequence[str], *names: str
) -> tuple[list[ScoreInput], str]:
    """One side's texts and media, and the name under which they came."""
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        raise RequestError(
            f"{names[0]}: exactly one of {' and '.join(names)} must be given", param=names[0]
        )
    return sides_of(given[0], getattr(body, given[0]), modalities), given[0]


class Rerank(_Scoring):
    """Checks a request when made; then :meth:`respond`, once.

    Raises:
        RequestError: naming the field.
    """

    spelling: Mapping[str, str] = {
        "text_1": "query", "text_2": "documents", "prompt": "documents",
        "prompt_token_ids": "documents",
    }  # fmt: skip

    def __init__(self, body: RerankRequest, request: Request, state: ServerState) -> None:
        super().__init__(body, request, state, "rerank-")
        self._query = query_of(body.query, self.model.modalities)
        self._documents, self._given = _documents(body, self.model.modalities)
        self._most_tokens = body.max_tokens_per_doc
        self._shown = body.return_documents is not False
        self._top_n = body.top_n or len(self._documents)

    async def respond(self) -> Response:
        documents: Sequence[ScoreInput] = self._documents
        if self._most_tokens is not None:
            documents = await in_order(self._shortened, documents, PARALLEL)
        outputs = await self.score([self._query], list(documents))
        return await self.state.off_loop(self.cost(outputs, len(outputs)), self._json, outputs)

    async def _shortened(self, _: int, text: ScoreInput) -> ScoreInput:
        engine, most = self.state.engine, self._most_tokens
        assert most is not None
        if not isinstance(text, str):  # media are read whole
            return text
        if len(text.encode("utf-8", "surrogatepass")) <= most:
            return text
        ids = (await engine.tokenize(text, add_special_tokens=False)).token_ids
        return text if len(ids) <= most else await engine.detokenize(ids[:most])

    def _json(self, outputs: Outputs) -> Response:
        best = sorted(range(len(outputs)), key=lambda index: -outputs[index].outputs.score)
        usage = self.usage(outputs)
        return JsonAnswer(
            msgspec.json.encode(
                {
                    "id": self.id,
                    "model": self.model.name,
                    "usage": {
                        "prompt_tokens": usage.prompt_tokens,
                        "total_tokens": usage.total_tokens,
                    },
                    "results": encoded(self._results(best[: self._top_n], outputs)),
                }
            )
        )

    def _results(self, indices: Sequence[int], outputs: Outputs) -> Iterator[dict[str, Any]]:
        for index in indices:
            result: dict[str, Any] = {"index": index}
            if self._shown:
                result["document"] = self._given[index]
            result["relevance_score"] = outputs[index].outputs.score
            yield result | self.ids_of(outputs[index])


def _documents(
    body: RerankRequest, modalities: Sequence[str]
) -> tuple[list[ScoreInput], list[dict[str, Any]]]:
    """The texts and media of a body's documents, and the documents as they are given back."""
    given = body.documents
    if not isinstance(given, list):
        sides = sides_of("documents", given, modalities)
        return sides, [_shown(side) for side in sides]
    texts: list[ScoreInput] = []
    shown: list[dict[str, Any]] = []
    for index, document in enumerate(given):
        if isinstance(document, str):
            texts.append(document)
            shown.append({"text": document})
        else:
            texts.append(document_text(index, document, body.rank_fields))
            shown.append({**document, "text": texts[-1]})
    return texts, shown


def _shown(side: ScoreInput) -> dict[str, Any]:
    """A document as the client gave it."""
    if not isinstance(side, Mapping):
        return {"text": side}
    parts: Any = side["content"]  # type: ignore[typeddict-item]
    own = [{k: v for k, v in part.items() if k != convert.CLIENT_PLACE} for part in parts]
    return {"multi_modal": {"content": own}}
