"""A proxy in front of engines that encode media (E) and engines that answer (PD).

The parts of a chat that bring media go to an encoder, each in a request of its own. Then the whole chat goes
to an engine that answers, which takes the vectors instead of encoding. Text goes there at once.

    pip install 'headrace[all]'
    HOW='"ec_connector": "files", "ec_connector_extra_config": {"shared_storage_path": "/dev/shm/vectors"}'
    headrace serve MODEL --port 8101 --ec-transfer-config "{\\"ec_role\\": \\"ec_producer\\", $HOW}"
    headrace serve MODEL --port 8102 --ec-transfer-config "{\\"ec_role\\": \\"ec_consumer\\", $HOW}"
    python examples/disaggregated_encoder_proxy.py --encoder http://127.0.0.1:8101 \\
        --decoder http://127.0.0.1:8102

Several of both may be given. The same part always goes to the same encoder, so that it is encoded once. An
encoder that fails costs time only: the other side encodes what it does not find. A demonstration: it checks
no keys of its own, but passes those of clients on.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response, StreamingResponse

logger = logging.getLogger("proxy")

MEDIA = frozenset({"image_url", "video_url", "audio_url", "input_audio"})
"""Types of parts that an encoder has work with."""
NAMED = ("model", "mm_processor_kwargs", "cache_salt")
"""Fields of a chat that are part of what an item is known by, and the model."""
PASSED_ON = ("authorization", "x-api-key", "x-request-id")
"""Headers of clients that the engines get."""
CHATS = "/v1/chat/completions"


def media_parts(chat: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Parts of a chat that bring media, each once; how well they are formed is for the engines to say."""
    messages, seen = chat.get("messages"), set()
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict):
                continue
            kind = part.get("type") or next((key for key in MEDIA if key in part), None)
            name = json.dumps(part, sort_keys=True)
            if kind in MEDIA and part.get(kind) is not None and name not in seen:
                seen.add(name)
                yield part


def encoders_chat(chat: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """The request by which an encoder encodes one part."""
    named = {name: chat[name] for name in NAMED if name in chat}
    return {**named, "max_tokens": 1, "messages": [{"role": "user", "content": [dict(part)]}]}


class Proxy:
    """Args:
    encoders: their URLs; none: everything goes to a decoder.
    decoders: URLs of the engines that answer, in turn.
    """

    def __init__(
        self, encoders: Sequence[str], decoders: Sequence[str], client: httpx2.AsyncClient
    ) -> None:
        self._encoders, self._decoders = encoders, itertools.cycle(decoders)
        self._client = client

    async def encode(self, chat: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        """Have the media of a chat encoded, all at the same time."""
        if self._encoders:
            await asyncio.gather(*(self._one(chat, part, headers) for part in media_parts(chat)))

    async def _one(
        self, chat: Mapping[str, Any], part: Mapping[str, Any], headers: Mapping[str, str]
    ) -> None:
        name = hashlib.sha256(json.dumps(part, sort_keys=True).encode()).digest()
        url = self._encoders[int.from_bytes(name[:8], "big") % len(self._encoders)]
        try:
            answer = await self._client.post(
                url + CHATS, json=encoders_chat(chat, part), headers=headers
            )
        except httpx2.HTTPError as error:
            logger.warning("encoder %s: %r", url, error)
            return
        if (
            answer.status_code != 200
        ):  # what is wrong with the request, the decoder tells the client
            logger.warning("encoder %s: %d %s", url, answer.status_code, answer.text[:200])

    async def answer(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Response:
        """Pass a request to a decoder and its answer back, as it comes."""
        given = {**headers, "content-type": "application/json"}
        request = self._client.build_request(
            method, next(self._decoders) + path, content=body, headers=given
        )
        try:
            answer = await self._client.send(request, stream=True)
        except httpx2.HTTPError as error:
            raise HTTPException(502, f"no engine answers: {error!r}") from error

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.aiter_raw():
                    yield piece
            finally:
                await answer.aclose()  # the client has left, or all of it was sent

        kind = answer.headers.get("content-type")
        return StreamingResponse(pieces(), status_code=answer.status_code, media_type=kind)


def make_app(encoders: Sequence[str], decoders: Sequence[str]) -> FastAPI:
    """The routes."""
    client = httpx2.AsyncClient(timeout=httpx2.Timeout(None, connect=5.0))
    proxy = Proxy(encoders, decoders, client)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await client.aclose()

    app = FastAPI(lifespan=lifespan)

    def passed_on(request: Request) -> dict[str, str]:
        return {name: request.headers[name] for name in PASSED_ON if name in request.headers}

    @app.post(CHATS)
    async def chats(request: Request) -> Response:
        body, headers = await request.body(), passed_on(request)
        try:
            chat = json.loads(body)
        except ValueError:
            chat = None  # the decoder's error says it best
        if isinstance(chat, dict):
            await proxy.encode(chat, headers)
        return await proxy.answer("POST", CHATS, body, headers)

    @app.get("/v1/models")
    @app.get("/health")
    async def facts(request: Request) -> Response:
        return await proxy.answer("GET", request.url.path, b"", passed_on(request))

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--encoder", nargs="*", default=[], help="URLs of engines that encode")
    parser.add_argument("--decoder", nargs="+", required=True, help="URLs of engines that answer")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100)
    args = parser.parse_args()
    encoders, decoders = (
        [url.rstrip("/") for url in urls] for urls in (args.encoder, args.decoder)
    )
    uvicorn.run(make_app(encoders, decoders), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
