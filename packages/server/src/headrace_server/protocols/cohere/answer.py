"""One call of ``/v2/embed``: Cohere's spelling of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from headrace_core.arrays import PackedArray
from headrace_core.errors import PromptTooLong, RequestError, UnsupportedFeature
from headrace_core.output import PoolingOutput, PoolingRequestOutput
from headrace_core.pooling import PoolingInfo, PoolingParams
from headrace_core.request import Prompt, TextPrompt
from headrace_server.pooling.call import PoolingCall
from headrace_server.pooling.vectors import as_base64, as_bits, as_json
from headrace_server.protocols.cohere.protocol import CohereEmbedRequest
from headrace_server.requests.convert import content_parts
from headrace_server.state import ServerState
from headrace_server.streaming.json_parts import JsonParts, answer_of, json_parts

Outputs = Sequence[PoolingRequestOutput[PoolingOutput]]

PROMPT_NAMES: Mapping[str, tuple[str, ...]] = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage", "corpus"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""Cohere's input types -> names that checkpoints give their prompts for them, whatever the letter case.
Those of queries and documents are the names that Sentence Transformers 5 looks for in ``encode_query``
and ``encode_document``."""
_WITHOUT_PROMPT = ("search_query", "search_document")
"""Types that a checkpoint with prompts for other things may have no prompt for: their texts come as they
are, or with the default prompt, as in Sentence Transformers."""
_FORMS: Mapping[str, Callable[[PackedArray], Iterator[bytes]]] = {
    "float": as_json,
    "base64": lambda values: as_base64(values.data, "float32", "little"),
    "binary": lambda values: as_bits(values, signed=True),
    "ubinary": lambda values: as_bits(values, signed=False),
}


class CohereEmbedding(PoolingCall):
    """Checks a request when made; then :meth:`respond`, once.

    Raises:
        RequestError: naming the field.
    """

    def __init__(self, body: CohereEmbedRequest, request: Request, state: ServerState) -> None:
        super().__init__(body, request, state, "")
        self._texts, field = _texts(body)
        self._echoed = body.texts
        self._types = _types(body)
        self.spelling: Mapping[str, str] = {
            "prompt": field, "dimensions": "output_dimension", "prompt_name": "input_type",
            "truncate_prompt_tokens": "max_tokens",
        }  # fmt: skip
        info = self.model.pooling
        assert info is not None, "the route is there for models that embed"
        self.params = PoolingParams(
            dimensions=body.output_dimension,
            prompt_name=_prompt_name(body.input_type, info),
            truncate_prompt_tokens=_most_tokens(body, self.model.max_model_len),
            truncation_side="left" if body.truncate == "START" else "right",
        )
        if {"binary", "ubinary"} & set(self._types):
            _check_whole_bytes(body.output_dimension or info.dimensions or info.embedding_size)

    async def respond(self) -> Response:
        prompts: list[Prompt] = [TextPrompt(prompt=text) for text in self._texts]
        try:
            outputs = await self.encode_each(prompts, "embed", True)
        except PromptTooLong as error:
            if self.params.truncate_prompt_tokens is None:
                raise _not_cut(error) from error
            raise
        count = sum(output.outputs.data.shape[-1] for output in outputs) * len(self._types)
        answer: dict[str, Any] = {
            "id": self.id,
            "response_type": "embeddings_by_type",
            "embeddings": {name: self._vectors(name, outputs) for name in self._types},
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": self.usage(outputs).prompt_tokens},
            },
        }
        if self._echoed is not None:
            answer["texts"] = iter(self._echoed)
        return answer_of(json_parts(answer), self.state.off_loop, self.cost(outputs, count))

    @staticmethod
    def _vectors(name: str, outputs: Outputs) -> Iterator[Any]:
        return (JsonParts(_FORMS[name](output.outputs.data)) for output in outputs)


def _texts(body: CohereEmbedRequest) -> tuple[list[str], str]:
    """The texts, and the field that they came in."""
    if (body.texts is None) == (body.inputs is None):
        raise RequestError("texts: exactly one of texts and inputs must be given", param="texts")
    if body.texts is not None:
        return body.texts, "texts"
    found = []
    for index, given in enumerate(body.inputs or ()):
        parts = content_parts(f"inputs[{index}]", given.content, modalities=())
        found.append("\n".join(part["text"] for part in parts))
    return found, "inputs"


def _types(body: CohereEmbedRequest) -> list[str]:
    """The forms of vectors, each once."""
    for name in body.embedding_types:
        if name not in _FORMS:
            raise UnsupportedFeature(
                f"embedding_types: {name!r} needs the range of the model's numbers, which checkpoints "
                f"do not state; must be of {list(_FORMS)}",
                param="embedding_types",
            )
    return list(dict.fromkeys(body.embedding_types))


def _most_tokens(body: CohereEmbedRequest, limit: int) -> int | None:
    """Tokens that are kept of a text; None: longer texts are refused."""
    if body.truncate != "NONE":
        return -1 if body.max_tokens is None else min(body.max_tokens, limit)
    if body.max_tokens is not None and body.max_tokens < limit:
        raise UnsupportedFeature(
            f"max_tokens = {body.max_tokens}: must be left out with truncate 'NONE'; send 'START' or "
            "'END', which cut a text to it",
            param="max_tokens",
        )
    return None


def _not_cut(error: PromptTooLong) -> PromptTooLong:
    """The same error, with advice in this wire's words."""
    return PromptTooLong(
        error.limit,
        error.num_prompt_tokens,
        at_least=error.at_least,
        param=error.param or "prompt",
        hint="Shorten the text, or cut it with truncate 'START' or 'END'.",
    )


def _prompt_name(input_type: str | None, info: PoolingInfo) -> str | None:
    """The checkpoint's prompt for an input type; None: its default one, or none.

    Raises:
        RequestError: it has prompts, none of them for this type; or nobody knows the type.
    """
    if input_type is None or input_type in info.prompts:
        return input_type
    lower = {name.lower(): name for name in reversed(list(info.prompts))}
    for name in PROMPT_NAMES.get(input_type, ()):
        if name in lower:
            return lower[name]
    if input_type in PROMPT_NAMES and (not info.prompts or input_type in _WITHOUT_PROMPT):
        return None
    if input_type == "image":
        raise UnsupportedFeature(
            "input_type = 'image': embeddings of images are not supported", param="input_type"
        )
    known = [*_WITHOUT_PROMPT, *info.prompts] if info.prompts else [*PROMPT_NAMES]
    raise RequestError(
        f"input_type = {input_type!r}: must be one of {known}", param="input_type", value=input_type
    )


def _check_whole_bytes(size: int) -> None:
    if size % 8:
        raise RequestError(
            f"embedding_types: binary vectors of {size} numbers do not fill whole bytes; the size must "
            "be a multiple of 8 (output_dimension)",
            param="embedding_types",
        )
