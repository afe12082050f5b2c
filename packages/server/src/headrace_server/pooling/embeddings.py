"""One call of ``/v1/embeddings`` or ``/pooling``: prompts to vectors, in the client's encoding."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from headrace_core.arrays import PackedArray
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.output import PoolingOutput, PoolingRequestOutput
from headrace_server.pooling.call import PoolingCall
from headrace_server.pooling.inputs import inputs_of
from headrace_server.pooling.vectors import (
    ITEM_BYTES,
    as_base64,
    as_bytes,
    as_json,
    as_sparse_json,
    resolved,
)
from headrace_server.protocols.openai.bodies.pooling import (
    EmbeddingChatRequest,
    EmbeddingTextRequest,
    PoolingChatRequest,
    PoolingTextRequest,
    WireFields,
)
from headrace_server.state import ServerState
from headrace_server.streaming.json_parts import JsonParts, answer_of

MAX_METADATA = 60_000
"""Bytes of the header that describes binary answers; common clients read lines of 65,536."""
_DEFAULT_TASKS = ("token_embed", "token_classify")

Outputs = Sequence[PoolingRequestOutput[PoolingOutput]]


class Vectors(PoolingCall):
    """Checks a request when made; then :meth:`respond`, once.

    Args:
        task: what the engine is asked for.
        prefix: of the answer's id.
        kind: what an item is called.
        key: under which it has its numbers.

    Raises:
        RequestError: naming the field.
    """

    def __init__(
        self,
        body: EmbeddingTextRequest | EmbeddingChatRequest | PoolingTextRequest | PoolingChatRequest,
        request: Request,
        state: ServerState,
        *,
        task: str = "embed",
        prefix: str = "embd-",
        kind: str = "embedding",
        key: str = "embedding",
    ) -> None:
        super().__init__(body, request, state, prefix)
        check_wire(body)
        self._task, self._kind, self._key = task, kind, key
        self._wire: WireFields = body
        self._sparse = body.sparse
        if body.sparse:
            self._check_sparse()
        self._inputs = inputs_of(body, state)
        self.spelling: Mapping[str, str] = dict.fromkeys(
            ("prompt", "prompt_token_ids"), self._inputs.field
        )

    def _check_sparse(self) -> None:
        pooling = self.model.pooling
        if self._wire.encoding_format != "float":
            raise RequestError(
                f"sparse: cannot be combined with encoding_format = {self._wire.encoding_format!r}",
                param="sparse",
            )
        if pooling is None or not pooling.sparse or self._task != "embed":
            raise UnsupportedFeature(
                "sparse: only for embeddings of models that have an entry for each token of the "
                "vocabulary; leave it out",
                param="sparse",
            )

    async def respond(self) -> Response:
        prompts, special, _ = self._inputs
        outputs = await self.encode_each(prompts, self._task, special)
        count = sum(math.prod(output.outputs.data.shape) for output in outputs)
        if self._wire.encoding_format.startswith("bytes"):
            return self._binary(outputs, self.cost(outputs, count))
        return self.list_of(self._items(outputs), outputs, count)

    def _items(self, outputs: Outputs) -> Iterator[dict[str, Any]]:
        for index, output in enumerate(outputs):
            numbers = self._numbers(output.outputs.data)
            item = {"index": index, "object": self._kind, self._key: JsonParts(numbers)}
            yield item | self.ids_of(output)

    def _numbers(self, values: PackedArray) -> Iterator[bytes]:
        wire = self._wire
        if wire.encoding_format == "base64":
            return as_base64(values.data, wire.embed_dtype, wire.endianness)
        return as_sparse_json(values) if self._sparse else as_json(values)

    def _binary(self, outputs: Outputs, cost: int) -> Response:
        """All vectors, one behind the other; a header says where each begins."""
        wire = self._wire
        arrays = (output.outputs.data.data for output in outputs)
        body = itertools.chain.from_iterable(
            as_bytes(data, wire.embed_dtype, wire.endianness) for data in arrays
        )
        answer = partial(answer_of, body, self.state.off_loop, cost, "application/octet-stream")
        if wire.encoding_format == "bytes_only":
            return answer()
        # json, not msgspec: a header's characters are ASCII.
        metadata = json.dumps(self._metadata(outputs), separators=(",", ":"))
        if len(metadata) > MAX_METADATA:
            raise RequestError(
                f"encoding_format = 'bytes': the header 'metadata' would have {len(metadata)} "
                f"bytes, more than {MAX_METADATA}; send fewer inputs, or ask for 'bytes_only'",
                param="encoding_format",
            )
        return answer(headers={"metadata": metadata})

    def _metadata(self, outputs: Outputs) -> dict[str, Any]:
        items, end = [], 0
        for index, output in enumerate(outputs):
            shape = list(output.outputs.data.shape)
            start, end = end, end + math.prod(shape) * ITEM_BYTES[self._wire.embed_dtype]
            item = {
                "index": index,
                "embed_dtype": self._wire.embed_dtype,
                "endianness": resolved(self._wire.endianness),
                "start": start,
                "end": end,
                "shape": shape,
            }
            if self._with_ids:
                item["prompt_token_ids"] = output.prompt_token_ids
            items.append(item)
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model.name,
            "data": items,
            "usage": self.usage(outputs).model_dump(),
        }


def check_wire(fields: WireFields) -> None:
    """Raises RequestError for a type or an order of bytes where numbers are JSON's."""
    if fields.encoding_format != "float":
        return
    if fields.embed_dtype != "float32":
        raise RequestError(
            f"embed_dtype = {fields.embed_dtype!r}: cannot be combined with encoding_format = 'float'",
            param="embed_dtype",
        )
    if fields.endianness != "native":
        raise RequestError(
            f"endianness = {fields.endianness!r}: cannot be combined with encoding_format = 'float'",
            param="endianness",
        )


def pooling_task(asked: str | None, tasks: Sequence[str]) -> str:
    """The task of a ``/pooling`` request that gives texts.

    Raises:
        RequestError: the model does not have it, or none that goes without saying.
    """
    if asked is None:
        asked = next((task for task in _DEFAULT_TASKS if task in tasks), None)
    if asked is None:
        raise RequestError(
            f"task: must be given: one of {sorted(tasks)}, which this model has", param="task"
        )
    if asked == "plugin":
        raise RequestError("task = 'plugin': the request must have data", param="data")
    if asked not in tasks:
        raise UnsupportedFeature(
            f"task = {asked!r}: must be one of {sorted(tasks)}, which this model has", param="task"
        )
    return asked
