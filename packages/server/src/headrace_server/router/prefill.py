"""Prompts that other servers compute than those that answer.

A server that prefills gets the request for one token, with ``kv_transfer_params`` that say so, and answers
with those by which another engine finds its blocks. The request goes on to a server that decodes with these.
Whatever goes wrong on the way there, the request goes on as it came: the server that decodes computes its
prompt itself.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import msgspec

from headrace_server.router.requests import ReadRequest
from headrace_server.router.servers import Server, ServerPool
from headrace_server.router.upstream import ConnectError, Headers, UpstreamError

logger = logging.getLogger(__name__)

LIMITS = {"/v1/chat/completions": "max_completion_tokens", "/v1/completions": "max_tokens"}
"""Paths whose prompts are computed elsewhere -> the field that limits the answer."""
_LEFT_OUT = frozenset({
    "max_tokens", "max_completion_tokens", "min_tokens", "stream_options", "n", "best_of", "logprobs",
    "top_logprobs", "prompt_logprobs", "echo", "thinking_token_budget",
})  # fmt: skip
"""Fields that say nothing of the prompt, and do not go with one token."""
_WHOLE = frozenset({"kv_transfer_params", "use_beam_search"})
"""Fields of requests that are not divided."""
_ASKED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
MAX_TRIES = 2
MAX_ANSWER = 16 << 20
BUSY = frozenset({429, 502, 503, 504})


class _Found(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


class Transport(NamedTuple):
    """How a request is sent: target with its query, and headers."""

    target: bytes
    headers: Headers


class Prefill:
    """Has prompts computed.

    Args:
        pool: the servers that prefill.
    """

    def __init__(self, pool: ServerPool) -> None:
        self.pool = pool
        self.num_divided = self.num_whole = 0
        """Requests whose prompts were computed there, and those that went on as they came."""

    async def prepared(self, request: ReadRequest, how: Transport) -> bytes:
        """The body for a server that decodes, once the prompt has been computed; else as it came."""
        body = request.prompt.body
        limit = LIMITS.get(request.prompt.path)
        fields = None if limit is None else _fields(body)
        if limit is None or fields is None or not _WHOLE.isdisjoint(fields):
            return body
        found = await self._computed(request, how, _for_one_token(fields, limit))
        if found is None:
            self.num_whole += 1
            return body
        self.num_divided += 1
        return msgspec.json.encode({**fields, "kv_transfer_params": found})

    async def _computed(
        self, request: ReadRequest, how: Transport, body: bytes
    ) -> msgspec.Raw | None:
        """``kv_transfer_params`` of a server that has computed the prompt; None: nobody has."""
        tried: list[Server] = []
        while len(tried) < MAX_TRIES:
            server = await self.pool.choose(request.prompt, request.model, tried)
            if server is None:
                break
            tried.append(server)
            try:
                status, answer = await _asked(server, how, body)
            except UpstreamError as error:
                logger.warning("%s prefills nothing: %s", server.url, error)
                server.failed(str(error), is_down=isinstance(error, ConnectError))
                continue
            server.succeeded()
            if status == 200:
                return _params(answer)
            if status not in BUSY:
                return None  # the server that decodes says what is wrong with it
        return None


async def _asked(server: Server, how: Transport, body: bytes) -> tuple[int, bytes]:
    """Status and body of a server's answer.

    Raises:
        UpstreamError: it broke off, or was not to be reached.
    """
    server.in_flight += 1
    server.num_requests += 1
    try:
        came = await server.upstream.request("POST", how.target, how.headers, body)
        try:
            return came.status, await came.read(MAX_ANSWER)
        finally:
            came.close()
    finally:
        server.in_flight -= 1


def _fields(body: bytes) -> dict[str, Any] | None:
    """Fields of a body, as they were written; None: it is no JSON object."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None


def _for_one_token(fields: dict[str, Any], limit: str) -> bytes:
    kept = {name: value for name, value in fields.items() if name not in _LEFT_OUT}
    return msgspec.json.encode({**kept, limit: 1, "stream": False, "kv_transfer_params": _ASKED})


def _params(answer: bytes) -> msgspec.Raw | None:
    try:
        found = msgspec.json.decode(answer, type=_Found).kv_transfer_params
    except (msgspec.MsgspecError, ValueError):
        return None
    return found if bytes(found).startswith(b"{") else None
