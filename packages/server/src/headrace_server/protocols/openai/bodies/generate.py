"""``POST /inference/v1/generate``: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Struct, UnsetType
from pydantic import BaseModel, Field

from headrace_server.protocols.base import Refusal, RequestBody, ShortText, TokenIds
from headrace_server.protocols.openai.bodies.completions import PromptLogprobsField
from headrace_server.protocols.openai.bodies.sampling import (
    KVTransferParams,
    SamplingFields,
    StreamOptions,
    Xargs,
)
from headrace_server.protocols.openai.bodies.structured import StructuredOutputs
from headrace_server.protocols.openai.bodies.usage import Usage

_NO_TEXT = "this route returns tokens, not text"


class TokenSampling(SamplingFields):
    """All of :class:`~headrace_core.sampling.params.SamplingParams` that has a meaning for tokens."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        "detokenize": Refusal(_NO_TEXT, False, True),
        "output_kind": Refusal("stream decides it", 0, 1, 2),
        "flat_logprobs": Refusal("the answer has one form", False),
        "logprob_token_ids": Refusal("the answer has only the likeliest tokens"),
        "skip_clone": Refusal("belongs to the Python object", False, True),
        "logits_processors": Refusal("per-request logits processors are not supported"),
    }

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        16, description="Null: until the context is full."
    )
    logprobs: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="This many likeliest tokens per position, and the chosen one."
    )
    structured_outputs: StructuredOutputs | None = None
    extra_args: Xargs | None = Field(None, description="For plug-ins.")


class GenerateRequest(RequestBody):
    """Continue token ids with token ids."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        "features": Refusal("media input is not supported by this version; leave it out"),
        **{name: Refusal("belongs into sampling_params") for name in TokenSampling.model_fields},
    }

    token_ids: TokenIds
    sampling_params: TokenSampling = Field(default_factory=lambda: TokenSampling.model_validate({}))
    model: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="Served model name; null: the first."
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    request_id: ShortText | None = None
    kv_transfer_params: KVTransferParams | None = None


class GeneratedToken(BaseModel):
    """One token at one position."""

    token: str
    """``token_id:N``."""
    token_id: int
    logprob: float
    rank: int | None
    """Rank among the vocabulary; 1 is the likeliest. None: not known."""
    bytes: list[int] | None
    """Bytes that the token adds to the text; None: not known, as without a tokenizer."""


class GeneratedPosition(GeneratedToken):
    """One chosen token and its rivals."""

    top_logprobs: list[GeneratedToken]


class GenerateLogprobs(BaseModel):
    """Log-probabilities of a continuation's tokens."""

    content: list[GeneratedPosition]


class ChunkGeneratedToken(Struct):
    """:class:`GeneratedToken` as it is encoded."""

    token: str
    token_id: int
    logprob: float
    rank: int | None
    bytes: list[int] | None


class ChunkGeneratedPosition(Struct):
    """:class:`GeneratedPosition` as it is encoded."""

    token: str
    token_id: int
    logprob: float
    rank: int | None
    bytes: list[int] | None
    top_logprobs: list[ChunkGeneratedToken]


class ChunkGenerateLogprobs(Struct):
    """:class:`GenerateLogprobs` as they are encoded."""

    content: list[ChunkGeneratedPosition]


class GenerateChoice(BaseModel):
    """One continuation."""

    index: int
    token_ids: list[int]
    logprobs: GenerateLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class GenerateResponse(BaseModel):
    """Answer of ``POST /inference/v1/generate``."""

    request_id: str
    choices: list[GenerateChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobsField | None = None
    kv_transfer_params: dict[str, Any] | None = None


class GenerateChunkChoice(Struct):
    index: int
    token_ids: list[int]
    logprobs: ChunkGenerateLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType = UNSET


class GenerateChunk(Struct):
    """One event of a streamed continuation."""

    request_id: str
    choices: list[GenerateChunkChoice]
    usage: Any = UNSET
