"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: what clients send and get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace_server.protocols.base import (
    FreeObject,
    Refusal,
    RequestBody,
    ShortText,
    StopText,
    Text,
)
from headrace_server.protocols.known_fields import KnownFields, RequestObject, known
from headrace_server.protocols.openai.bodies.chat import REPORTED_OTHERWISE
from headrace_server.protocols.openai.bodies.sampling import (
    IdleFields,
    RequestExtensions,
    SamplingExtensions,
    TemplateExtensions,
)

ANTHROPIC_REFUSALS: Mapping[str, Refusal] = {
    **REPORTED_OTHERWISE,
    "container": Refusal("this server has no containers"),
    "mcp_servers": Refusal("tool servers are the operator's; they serve /v1/responses", []),
    "diagnostics": Refusal("is not supported"),
    "inference_geo": Refusal("this server has no regions"),
    "speed": Refusal("there is one speed here", "standard"),
    "workspace_id": Refusal("this server has no workspaces"),
    "user_profile_id": Refusal("this server has no profiles"),
    "stop": Refusal("is called stop_sequences here"),
    "output_format": Refusal("is called output_config.format here"),
    "response_format": Refusal("is called output_config.format here"),
    "text": Refusal("is called output_config.format here", {}),
    "max_completion_tokens": Refusal("is called max_tokens here"),
    "max_output_tokens": Refusal("is called max_tokens here"),
    "reasoning_effort": Refusal("is called output_config.effort here"),
    "thinking_token_budget": Refusal("is called thinking.budget_tokens here"),
    "include_reasoning": Refusal("thinking decides it", True),
    "parallel_tool_calls": Refusal("is called tool_choice.disable_parallel_tool_use here", True),
    "verbosity": Refusal("is not part of this protocol; send it within chat_template_kwargs"),
    "stream_options": Refusal("usage is in every stream here"),
    "logprobs": Refusal("the answer has no field for log-probabilities", False),
    "top_logprobs": Refusal("the answer has no field for log-probabilities", 0),
    "return_tokens_as_token_ids": Refusal("the answer has no place for tokens", False),
    "truncate_prompt_tokens": Refusal("whole prompts are counted"),
}
"""Fields that a request declares are not refused: prompts are counted without sampling, and more is known
of a message."""


_CACHE = known("type ttl")
_IN_BLOCK = known("citations caller toolset_name", cache_control=_CACHE).fields
"""Fields of blocks that have no effect."""
_RESULT = KnownFields({**known("type text").fields, **_IN_BLOCK}, types=frozenset({"text"}))
"""A part of a tool's result."""


class ContentBlock(RequestObject):
    """A part of a message. Fields that are not declared have no effect."""

    also_known: ClassVar[Mapping[str, KnownFields | None]] = {"content": _RESULT, **_IN_BLOCK}

    type: Annotated[str, Field(max_length=64)]
    text: Text | None = None
    thinking: Text | None = None
    signature: Text | None = Field(None, description="Has no effect: this server signs nothing.")
    source: FreeObject | None = None
    id: ShortText | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    input: FreeObject | Text | None = Field(
        None, description="Arguments of a call; text if they were cut and are not valid JSON."
    )
    tool_use_id: ShortText | None = None
    content: Text | Annotated[list[FreeObject], Field(max_length=4096)] | None = None
    is_error: bool | None = None

    def is_searched(self) -> bool:
        """False for a block that is left out, or refused, because of its type."""
        return self.type in ("text", "thinking", "tool_use", "tool_result")


Blocks = Annotated[list[ContentBlock], Field(max_length=4096)]


class InputMessage(RequestObject):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Text | Blocks


class Thinking(RequestObject):
    """Setting of thoughts: if the model thinks, and if they are shown."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(RequestObject):
    """Choice of tools: if one is called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(max_length=256)] | None = None
    disable_parallel_tool_use: bool = False


class OutputConfig(RequestObject):
    """The answer's form, and how hard to think."""

    also_known: ClassVar[Mapping[str, KnownFields | None]] = {"format": known("type schema")}

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: FreeObject | None = None


class Metadata(BaseModel):
    """About the caller. Has no effect."""

    model_config = ConfigDict(extra="ignore")

    user_id: Annotated[str, Field(max_length=1024)] | None = None


_TOOLS = KnownFields(
    known(
        "type name description input_schema strict defer_loading eager_input_streaming "
        "allowed_callers input_examples",
        cache_control=_CACHE,
    ).fields,
    types=frozenset({"custom", None}),
)
_LIMIT = known("type value")
_EDITS = known(
    "",
    edits=known(
        "type exclude_tools clear_tool_inputs pause_after_compaction instructions",
        trigger=_LIMIT, keep=_LIMIT, clear_at_least=_LIMIT,
    ),
)  # fmt: skip


class CountTokensRequest(TemplateExtensions, RequestBody):
    """A conversation whose prompt is to be counted."""

    refused: ClassVar[Mapping[str, Refusal]] = ANTHROPIC_REFUSALS
    also_known: ClassVar[Mapping[str, KnownFields | None]] = {
        "tools": _TOOLS,
        "context_management": _EDITS,
        "cache_control": _CACHE,
    }

    model: Annotated[str, Field(max_length=1024)]
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=16384)]
    system: Text | Blocks | None = None
    tools: Annotated[list[FreeObject], Field(max_length=1024)] = Field([])
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: FreeObject | None = Field(
        None, description="Edits: old thoughts are dropped; others must change nothing."
    )
    cache_control: FreeObject | None = Field(
        None, description="Has no effect: every prompt's beginning is looked up in the cache."
    )

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, data: Any) -> Any:
        """Clients send null for fields that they do not set."""
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v is not None or k in _REQUIRED}


_REQUIRED = frozenset({"model", "messages", "max_tokens"})


class MessagesRequest(IdleFields, RequestExtensions, SamplingExtensions, CountTokensRequest):
    """Answer a conversation."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: Annotated[list[StopText], Field(max_length=64)] | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] = "auto"


class AnswerBlock(BaseModel):
    """A part of an answer: ``text``, ``thinking`` or ``tool_use``."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "thinking", "tool_use"]


class OutputDetails(BaseModel):
    """Purposes of output tokens."""

    thinking_tokens: int


class AnthropicUsage(BaseModel):
    """Tokens of a message."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    output_tokens_details: OutputDetails | None = None
    """None: nothing of the answer was parsed as reasoning."""


class Message(BaseModel):
    """Answer of ``POST /v1/messages``."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage


class MessageEvent(BaseModel):
    """Data of one event of a stream; it has more fields, by its type."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "message_start", "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop", "ping", "error",
    ]  # fmt: skip


class TokenCount(BaseModel):
    """Answer of ``POST /v1/messages/count_tokens``."""

    input_tokens: int


class AnthropicErrorInfo(BaseModel):
    """Description of an error."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """Body of every error answer below ``/v1/messages``."""

    type: Literal["error"] = "error"
    error: AnthropicErrorInfo
