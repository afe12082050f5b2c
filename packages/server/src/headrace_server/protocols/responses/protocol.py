"""``POST /v1/responses``: what clients send, and the shape of what they get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from headrace_server.protocols.base import (
    Count,
    FreeObject,
    Refusal,
    RequestBody,
    ShortText,
    StopText,
    Text,
)
from headrace_server.protocols.known_fields import KnownFields, RequestObject, known
from headrace_server.protocols.openai.bodies.chat import REPORTED_OTHERWISE, Effort
from headrace_server.protocols.openai.bodies.sampling import (
    IdleFields,
    RequestExtensions,
    SamplingExtensions,
    TemplateExtensions,
)

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    LOGPROBS,
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)

RESPONSES_REFUSALS: Mapping[str, Refusal] = {
    **REPORTED_OTHERWISE,
    "prompt": Refusal("this server stores no prompt templates; send input and instructions"),
    "conversation": Refusal("this server stores no conversations; use previous_response_id"),
    "context_management": Refusal("is not supported; use truncation", []),
    "moderation": Refusal("nothing is moderated here"),
    "access_programs": Refusal("are OpenAI's own"),
    "image": Refusal("images are not made here", {}),
    "previous_input_messages": Refusal("is not supported; send the messages as items of input", []),
    "background_options": Refusal("is not supported"),
    "n": Refusal("a response is one answer", 1),
    "logprobs": Refusal(f"is asked for by include: [{LOGPROBS!r}]", False),
    "include_reasoning": Refusal("reasoning is an item of the output", True),
    "return_token_ids": Refusal("is called enable_response_messages here", False),
    "add_generation_prompt": Refusal("an answer is a new message here", True),
    "continue_final_message": Refusal("an answer is a new message here", False),
    "max_tokens": Refusal("is called max_output_tokens here"),
    "stop_sequences": Refusal("is called stop here", []),
    "output_config": Refusal("is called text.format here", {}),
    "output_format": Refusal("is called text.format here"),
    "max_completion_tokens": Refusal("is called max_output_tokens here"),
    "response_format": Refusal("is called text.format here"),
    "messages": Refusal("is called input here"),
    "reasoning_effort": Refusal("is called reasoning.effort here"),
    "verbosity": Refusal("is called text.verbosity here"),
    "functions": Refusal("is the old form of tools, which is not supported"),
}

ItemId = Annotated[str, Field(max_length=256)]
CallName = Annotated[str, Field(min_length=1, max_length=256)]
"""A tool's name, or the id of a call."""
TextOrParts = Text | Annotated[list[FreeObject], Field(max_length=4096)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


_PARTS = known(
    "type text refusal annotations logprobs image_url file_id detail file_data file_url filename "
    "encrypted_content prompt_cache_breakpoint",
    input_audio=known("data format"),
)
_TOOLS = KnownFields(
    known(
        "type name description parameters strict defer_loading server_label server_description "
        "server_url connector_id authorization tunnel_id headers require_approval allowed_callers "
        "output_schema async",
        allowed_tools=known("tool_names read_only"),
    ).fields,
    types=frozenset({"function", "mcp"}),
)
_FORMAT = known("type name description schema strict")
_CALL = known("namespace caller name async").fields
"""Fields of calls, and of their outputs, for features that are not supported here."""


class BaseItem(RequestObject):
    """An item of the input. Fields that are not declared have no effect."""

    id: ItemId | None = None
    status: Literal["in_progress", "completed", "incomplete", "calling", "failed"] | None = None


class MessageItem(BaseItem):
    """A message, of a client or of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: TextOrParts

    also_known: ClassVar[Mapping[str, KnownFields | None]] = {"content": _PARTS, "phase": None}


class FunctionCallItem(BaseItem):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: CallName
    name: CallName
    arguments: Text

    also_known: ClassVar[Mapping[str, KnownFields | None]] = _CALL


class CallOutputItem(BaseItem):
    """A result that the client sends for a call."""

    call_id: CallName
    output: TextOrParts


class FunctionCallOutputItem(CallOutputItem):
    """Result of the client's function."""

    type: Literal["function_call_output"]

    also_known: ClassVar[Mapping[str, KnownFields | None]] = {"output": _PARTS, **_CALL}


class ReasoningText(RequestObject):
    """A part of reasoning."""

    type: Literal["reasoning_text", "summary_text", "text"] = "reasoning_text"
    text: Text


class ReasoningItem(BaseItem):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(max_length=4096)] = Field([])
    content: Annotated[list[ReasoningText], Field(max_length=4096)] | None = None
    encrypted_content: Text | None = None


class McpCallItem(BaseItem):
    """A call that the server made, with its result."""

    type: Literal["mcp_call"]
    server_label: ShortText
    name: CallName
    arguments: Text
    output: Text | None = None
    error: Any = None

    also_known: ClassVar[Mapping[str, KnownFields | None]] = known("approval_request_id").fields


class WebSearchCallItem(BaseItem):
    """A search of an earlier answer: what it found is not in the item."""

    type: Literal["web_search_call"]
    action: FreeObject | None = None


class CodeInterpreterCallItem(BaseItem):
    """Code that an earlier answer ran: its output is not in the item."""

    type: Literal["code_interpreter_call"]
    code: Text | None = None
    container_id: ShortText | None = None

    also_known: ClassVar[Mapping[str, KnownFields | None]] = known("outputs").fields


class CustomToolCallItem(BaseItem):
    """A call of a tool that takes any text, which another server's model made."""

    type: Literal["custom_tool_call"]
    call_id: CallName
    name: CallName
    input: Text

    also_known: ClassVar[Mapping[str, KnownFields | None]] = _CALL


class CustomToolCallOutputItem(CallOutputItem):
    """Result of the client's custom tool."""

    type: Literal["custom_tool_call_output"]

    also_known: ClassVar[Mapping[str, KnownFields | None]] = {"output": _PARTS, **_CALL}


class LocalShellCallItem(BaseItem):
    """A command that the client was told to run."""

    type: Literal["local_shell_call"]
    call_id: CallName
    action: FreeObject


class OtherItem(BaseModel):
    """An item of a type that is not supported; refused by its name."""

    model_config = ConfigDict(extra="allow")

    type: Any = None


_KINDS = frozenset(
    {"message", "function_call", "function_call_output", "reasoning", "mcp_call",
     "web_search_call", "code_interpreter_call", "custom_tool_call", "custom_tool_call_output",
     "local_shell_call"}
)  # fmt: skip


def _kind(value: Any) -> str:
    """Name of the model of an item, so that a malformed item is an error of that model alone."""
    given = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if given is None:
        has_role = "role" in value if isinstance(value, dict) else hasattr(value, "role")
        return "message" if has_role else "other"
    return given if isinstance(given, str) and given in _KINDS else "other"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[McpCallItem, Tag("mcp_call")]
    | Annotated[WebSearchCallItem, Tag("web_search_call")]
    | Annotated[CodeInterpreterCallItem, Tag("code_interpreter_call")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[CustomToolCallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[LocalShellCallItem, Tag("local_shell_call")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind),
]


class ReasoningOptions(RequestObject):
    """Reasoning options of the request."""

    context: Literal["auto"] | None = Field(
        None, description="The chat template decides which earlier reasoning is read."
    )
    effort: Effort | None = None
    mode: Literal["standard"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextOptions(RequestObject):
    """The answer's form."""

    also_known: ClassVar[Mapping[str, KnownFields | None]] = {"format": _FORMAT}

    format: FreeObject | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(RequestObject):
    """Parts of a stream besides the answer."""

    include_obfuscation: bool | None = Field(
        None, description="Pad events, so that their sizes do not reveal their text."
    )
    include_usage: bool = Field(
        True,
        description="A field of chats. Only true: the last event always has the usage.",
    )

    @field_validator("include_usage")
    @classmethod
    def _is_always_there(cls, value: bool) -> bool:
        if not value:
            raise PydanticCustomError(
                "usage_is_always_there",
                "false is not supported, only true: the last event of every response has its usage; leave "
                "the field out",
            )
        return value


class ResponsesRequest(
    IdleFields, TemplateExtensions, RequestExtensions, SamplingExtensions, RequestBody
):
    """Answer a list of items."""

    refused: ClassVar[Mapping[str, Refusal]] = RESPONSES_REFUSALS
    also_known: ClassVar[Mapping[str, KnownFields | None]] = {
        "tools": _TOOLS,
        "tool_choice": known("type name mode server_label tools"),
    }

    input: Text | Annotated[list[InputItem], Field(min_length=1, max_length=16384)]
    instructions: Text | None = None
    model: Annotated[str, Field(max_length=1024)] | None = None
    background: bool = False
    store: bool = Field(True, description="Has an effect where the server keeps responses.")
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    include: Annotated[list[ShortText], Field(max_length=64)] = Field([])
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(max_length=64)],
                Annotated[str, Field(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = "auto"
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=64)] | None = None
    thinking_token_budget: Count | None = Field(
        None, description="Most tokens of reasoning; then its end is forced."
    )
    return_tokens_as_token_ids: bool | None = None
    text: TextOptions | None = None
    tool_choice: ShortText | FreeObject = "auto"
    tools: Annotated[list[FreeObject], Field(max_length=1024)] = Field([])
    top_logprobs: Annotated[int, Field(ge=0, lt=2**31)] = 0
    truncation: Literal["auto", "disabled"] = "disabled"
    enable_response_messages: bool = Field(
        False, description="Return the prompts and outputs of each turn, as text and token ids."
    )

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, data: Any) -> Any:
        """Clients send null for fields that they do not set."""
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v is not None or k == "input"}


class IncompleteDetails(BaseModel):
    """Why a response stopped early."""

    reason: Literal["max_output_tokens", "content_filter"]


class ResponseFailure(BaseModel):
    """Why a response failed."""

    code: str
    message: str


class InputTokensDetails(BaseModel):
    """Where input tokens came from."""

    cached_tokens: int
    input_tokens_per_turn: list[int]
    cached_tokens_per_turn: list[int]


class OutputTokensDetails(BaseModel):
    """Purposes of output tokens."""

    reasoning_tokens: int
    tool_output_tokens: int
    output_tokens_per_turn: list[int]
    tool_output_tokens_per_turn: list[int]


class ResponseUsage(BaseModel):
    """Tokens of a response, summed over the model's turns."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(BaseModel):
    """Answer of ``POST /v1/responses``; besides these fields it repeats the request's settings."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    output: list[FreeObject]
    previous_response_id: str | None = None
    store: bool
    usage: ResponseUsage | None = None


class ResponseEvent(BaseModel):
    """Data of one event of a stream; it has more fields, by its type."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(pattern=r"^(response\.[a-z_.]+|error)$")]
    sequence_number: Annotated[int, Field(ge=0)]
    """Rising from 0 without holes."""


class ItemList(BaseModel):
    """Answer of ``GET /v1/responses/{id}/input_items``."""

    object: Literal["list"] = "list"
    data: list[FreeObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(BaseModel):
    """Answer of ``DELETE /v1/responses/{id}``."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
