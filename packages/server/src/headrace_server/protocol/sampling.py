"""Sampling fields that completions and chats share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from headrace_server.protocol.base import (
    MAX_N,
    Count,
    Refusal,
    RequestBody,
    ShortText,
    StopText,
    TokenId,
)

_LATER = "is not served by this version; leave it out"

SAMPLING_REFUSALS: Mapping[str, Refusal] = {
    "use_beam_search": Refusal(f"beam search {_LATER}", False),
    "length_penalty": Refusal("belongs to beam search, which is not served", 1.0, 1),
    "best_of": Refusal("is not served; ask for n completions and choose"),
    "response_format": Refusal(f"structured output {_LATER}", {"type": "text"}),
    "structured_outputs": Refusal(f"structured output {_LATER}"),
    "guided_json": Refusal(f"structured output {_LATER}"),
    "guided_regex": Refusal(f"structured output {_LATER}"),
    "guided_choice": Refusal(f"structured output {_LATER}"),
    "guided_grammar": Refusal(f"structured output {_LATER}"),
    "logits_processors": Refusal("per-request logits processors are not served"),
    "kv_transfer_params": Refusal(f"KV transfer {_LATER}"),
    "mm_processor_kwargs": Refusal(f"media input {_LATER}"),
    "service_tier": Refusal("there are no tiers here", "auto", "default"),
}


class StreamOptions(BaseModel):
    """What a stream reports besides its text."""

    include_usage: bool = True
    continuous_usage_stats: bool = False


class SamplingBody(RequestBody):
    """Fields of :class:`~headrace_core.sampling.SamplingParams` as clients spell them."""

    model: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="A served name; null: the first."
    )
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    logit_bias: Annotated[dict[str, float], Field(max_length=1024)] | None = Field(
        None, description="Token id (as text) -> added to its logit; clamped to -100..100."
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    min_tokens: Count = 0
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=2**20)] | None = None
    bad_words: Annotated[list[StopText], Field(max_length=1024)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    request_id: ShortText | None = None
    headrace_xargs: Annotated[dict[str, Any], Field(max_length=256)] | None = Field(
        None, description="For plug-ins; handed on as extra_args."
    )
    vllm_xargs: Annotated[dict[str, Any], Field(max_length=256)] | None = Field(
        None, description="The same as headrace_xargs."
    )
    user: ShortText | None = Field(None, description="Has no effect.")

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, data: Any) -> Any:
        """Clients send null for fields that they do not set."""
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v is not None or k in _NULL_MATTERS}


_NULL_MATTERS = frozenset({"max_tokens", "prompt", "messages"})
