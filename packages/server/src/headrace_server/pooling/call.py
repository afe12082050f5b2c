"""Base of calls that pool: checks, many engine requests for one answer, counting."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from headrace_core.engine import AdmissionTicket
from headrace_core.errors import RequestError
from headrace_core.output import PoolingOutput, PoolingRequestOutput
from headrace_core.pooling import PoolingParams
from headrace_core.request import Prompt
from headrace_core.served_model import ServedModel
from headrace_server.http.routing import respell
from headrace_server.observability.request_log import log_request
from headrace_server.pooling.answer_size import check_answer_size
from headrace_server.protocols.cohere.protocol import CohereEmbedRequest
from headrace_server.protocols.openai.bodies.pooling import PoolingBody
from headrace_server.protocols.openai.bodies.usage import PromptTokensDetails, Usage
from headrace_server.requests import convert
from headrace_server.requests.bounded_gather import in_order
from headrace_server.state import ServerState
from headrace_server.streaming.event_stream import wait_watching
from headrace_server.streaming.json_parts import answer_of, json_parts
from headrace_server.streaming.offload import encoded

PARALLEL = 256
"""Engine requests that one call has at a time: enough to fill steps, few beside what may wait."""
IDS = 4096
"""Token ids that are encoded in one call."""
_NUMBERS = 32
"""Numbers of an answer for one unit of cost (:mod:`headrace_server.streaming.offload`)."""
_PARAMS = (
    "truncate_prompt_tokens", "dimensions", "normalize", "softmax", "activation", "use_activation",
    "prompt_name",
)  # fmt: skip


class Respondent(Protocol):
    """A checked request that can be answered."""

    id: str
    state: ServerState
    spelling: Mapping[str, str]
    """The engine's names of fields -> the client's."""

    async def respond(self) -> Response:
        """The answer. Once."""
        ...


async def answer_pooled(call: Respondent, request: Request) -> Response:
    """Run a call and answer; if the client disconnects, all of it is aborted.

    Raises:
        RequestError: with ``param`` as the client spells it.
    """
    try:
        return await wait_watching(call.respond(), request, call.state.lifecycle, call.id)
    except RequestError as error:
        respell(error, call.spelling)
        raise


class PoolingCall:
    """Checks a request when made.

    Args:
        prefix: of the answer's id.

    Raises:
        RequestError: naming the field.
    """

    spelling: Mapping[str, str] = {}

    def __init__(
        self,
        body: PoolingBody | CohereEmbedRequest,
        request: Request,
        state: ServerState,
        prefix: str,
    ) -> None:
        self.state = state
        self.model: ServedModel = state.engine.model
        convert.check_model(body.model, self.model)
        body.check_fields(state)
        convert.choose_engine(request, state.engine)
        convert.check_priority(body.priority, self.model)
        self.id = convert.answer_id(prefix, body.request_id, request)
        self.created = int(time.time())
        asked: dict[str, Any] = {name: getattr(body, name, None) for name in _PARAMS}
        self.params = PoolingParams(
            **asked, truncation_side=getattr(body, "truncation_side", "left")
        )
        self._priority = body.priority
        self._with_ids = bool(body.return_token_ids)

    async def encode_each(
        self, prompts: Sequence[Prompt], task: str, special: bool | None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The results of all prompts, in order. The queue's limits count them as one request.

        Raises:
            RequestError: the answer would be too large.
        """
        await check_answer_size(prompts, self.params, self.state, task=task, special=special)
        entry = AdmissionTicket()

        def encode(position: int, prompt: Prompt) -> Awaitable[PoolingRequestOutput[PoolingOutput]]:
            name = convert.engine_id(self.id, position)
            log_request(self.state, name, self.params, prompt)
            return self.state.engine.encode(
                prompt,
                self.params,
                name,
                task=task,
                priority=self._priority,
                add_special_tokens=special,
                entry=entry,
            )

        return await in_order(encode, prompts, PARALLEL)

    def ids_of(self, output: PoolingRequestOutput[Any]) -> dict[str, Any]:
        """Fields of an item about its tokens, if they were asked for."""
        if not self._with_ids:
            return {}
        return {"prompt_token_ids": encoded(output.prompt_token_ids, IDS)}

    def usage(self, outputs: Sequence[PoolingRequestOutput[Any]]) -> Usage:
        """The sum over prompts."""
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        cached = sum(output.num_cached_tokens for output in outputs)
        details = self.state.settings.enable_prompt_tokens_details
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=0,
            total_tokens=prompt,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached) if details else None,
        )

    def cost(self, outputs: Sequence[PoolingRequestOutput[Any]], num_numbers: int) -> int:
        """Cost of encoding an answer with so many numbers."""
        ids = sum(len(output.prompt_token_ids) for output in outputs) if self._with_ids else 0
        return (num_numbers + ids) // _NUMBERS + len(outputs)

    def list_of(
        self,
        items: Iterator[dict[str, Any]],
        outputs: Sequence[PoolingRequestOutput[Any]],
        num_numbers: int,
    ) -> Response:
        """An answer with an item for each result; they are made while it is sent.

        Args:
            num_numbers: in all items.
        """
        answer = {
            "id": self.id,
            "object": "list",
            "created": self.created,
            "model": self.model.name,
            "data": items,
            "usage": self.usage(outputs).model_dump(),
        }
        return answer_of(json_parts(answer), self.state.off_loop, self.cost(outputs, num_numbers))
