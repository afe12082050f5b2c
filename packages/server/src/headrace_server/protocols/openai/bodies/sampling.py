"""Sampling fields that completions and chats share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from headrace_server.protocols.base import (
    MAX_N,
    Count,
    FreeObject,
    Refusal,
    RequestBody,
    ShortText,
    StopText,
    Text,
    TokenId,
    without_nulls,
)
from headrace_server.protocols.known_fields import RequestObject
from headrace_server.protocols.openai.bodies.structured import (
    ConstraintSpellings,
    ResponseFormat,
    StructuredOutputs,
)

SAMPLING_REFUSALS: Mapping[str, Refusal] = {
    "logits_processors": Refusal("per-request logits processors are not supported"),
    "stop_sequences": Refusal("is called stop here", []),
    "max_output_tokens": Refusal("is called max_tokens here"),
    "text": Refusal("is called response_format here", {}),
    "output_config": Refusal("is called response_format here", {}),
    "output_format": Refusal("is called response_format here"),
}


Bias = Annotated[float, Field(ge=-1e9, le=1e9)]


class StreamOptions(RequestObject):
    """Reports of a stream besides its text."""

    include_usage: bool = True
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = Field(
        None, description="Pad events, so that their sizes do not reveal their text."
    )


XargItem = (
    Text
    | bool
    | Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
    | Annotated[float, Field(ge=-1e308, le=1e308)]
)
XargValue = XargItem | Annotated[list[XargItem], Field(max_length=65536)]
Xargs = Annotated[dict[ShortText, XargValue], Field(max_length=256)]
"""Arguments for plug-ins: names to texts, numbers, or lists of them."""


class SamplingExtensions(BaseModel):
    """Sampling fields that a wire takes beside those of its own protocol."""

    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    logit_bias: Annotated[dict[ShortText, Bias], Field(max_length=1024)] | None = Field(
        None, description="Token id (as text) -> added to its logit; clamped to -100..100."
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1024)] | None = None
    min_tokens: Count = 0
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=2**20)] | None
    ) = None
    bad_words: Annotated[list[StopText], Field(max_length=1024)] | None = None


class SamplingFields(SamplingExtensions, RequestBody):
    """Fields of :class:`~headrace_core.sampling.params.SamplingParams` as clients spell them."""

    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=64)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    thinking_token_budget: Count | None = Field(
        None, description="Most tokens of reasoning; then its end is forced."
    )

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, data: Any) -> Any:
        return without_nulls(data, _NULL_MATTERS)


class IdleFields(BaseModel):
    """Published fields of OpenAI's that have no effect; clients send them on every wire."""

    user: Annotated[str, Field(max_length=1024)] | None = Field(None, description="Has no effect.")
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="Has no effect."
    )
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="Has no effect: the cache finds prompts by their content."
    )
    prompt_cache_options: FreeObject | None = Field(
        None, description="Has no effect: as prompt_cache_key."
    )
    prompt_cache_retention: ShortText | None = Field(
        None, description="Has no effect: the cache keeps prompts while there is room."
    )
    prediction: FreeObject | None = Field(
        None, description="Has no effect: it could only make an answer faster."
    )


class KVTransferParams(RequestObject):
    """Which other engine has the blocks of the prompt, or will want them; a proxy sends it."""

    do_remote_decode: bool = Field(
        False, description="Another engine goes on: the answer says where it finds the blocks."
    )
    do_remote_prefill: bool = Field(
        False, description="Another engine has the blocks, at remote_host and remote_port."
    )
    remote_engine_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    remote_block_ids: None = Field(None, description="Blocks are found by their content.")
    remote_host: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    remote_port: Annotated[int, Field(ge=1, lt=65536)] | None = None
    tp_size: Annotated[int, Field(ge=1, le=64)] | None = None

    def as_extra_args(self) -> dict[str, Any]:
        """As the engine reads them; {}: they ask for nothing."""
        if not (self.do_remote_decode or self.do_remote_prefill):
            return {}
        fields = self.model_dump(include=set(type(self).model_fields), exclude_none=True)
        return {"kv_transfer_params": fields}


class RequestExtensions(ConstraintSpellings):
    """A constraint, and how a request is run: fields that every wire which writes text takes."""

    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    request_id: ShortText | None = None
    headrace_xargs: Xargs | None = Field(None, description="For plug-ins; handed on as extra_args.")
    vllm_xargs: Xargs | None = Field(None, description="The same as headrace_xargs.")


class TemplateExtensions(BaseModel):
    """Fields that decide how a conversation is written."""

    chat_template: Text | None = None
    chat_template_kwargs: FreeObject | None = None
    documents: Annotated[list[FreeObject], Field(max_length=4096)] | None = None
    add_special_tokens: bool = False


CHAT_EXTENSIONS: tuple[str, ...] = tuple(
    name
    for part in (SamplingExtensions, RequestExtensions, TemplateExtensions)
    for name in part.model_fields
    if name != "request_id"
)
"""Fields that wires which become chats hand on under the chat's names."""


class SamplingBody(IdleFields, RequestExtensions, SamplingFields):
    """Fields that completions and chats share: sampling, the answer's form, and how it is reported."""

    model: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="Served model name; null: the first."
    )
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = Field(
        None, description="Must equal n: the server generates no extra completions."
    )
    use_beam_search: bool = Field(False, description="The n likeliest completions, by beams.")
    length_penalty: Annotated[float, Field(ge=-100, le=100)] = Field(
        1.0, description="With use_beam_search: above 1 favours long completions."
    )
    response_format: ResponseFormat | None = None
    kv_transfer_params: KVTransferParams | None = None
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool | None = None
    service_tier: ShortText | None = Field(None, description="Has no effect: there is one tier.")
    metadata: FreeObject | None = Field(None, description="Has no effect.")
    return_token_ids: bool | None = None
    return_weights_version: bool | None = Field(
        None,
        description="Add weights_versions to the answer: those of the weights that computed it.",
    )


_NULL_MATTERS = frozenset({"max_tokens", "prompt", "messages"})
