"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType
from pydantic import (
    BaseModel,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from headrace_server.chat.hosted_tools import without_foreign
from headrace_server.protocols.base import FreeObject, Refusal, ShortText, Text
from headrace_server.protocols.known_fields import KnownFields, RequestObject, known
from headrace_server.protocols.openai.bodies.completions import PromptLogprobsField
from headrace_server.protocols.openai.bodies.sampling import (
    SAMPLING_REFUSALS,
    SamplingBody,
    TemplateExtensions,
)
from headrace_server.protocols.openai.bodies.usage import Usage
from headrace_server.state import ServerState

CHAT_REFUSALS: Mapping[str, Refusal] = {
    **SAMPLING_REFUSALS,
    "functions": Refusal("is the old form of tools, which is not supported"),
    "function_call": Refusal("is the old form of tool_choice, which is not supported", "none"),
    "modalities": Refusal("only text is produced", ["text"]),
    "audio": Refusal("only text is produced"),
    "moderation": Refusal("nothing is moderated here"),
    "web_search_options": Refusal("this server has no web search"),
}


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""All words that clients have; which of them a model knows, its template says."""


_CACHE = known("type ttl")
"""``cache_control``, which some clients send here as to Anthropic; it has no effect."""
PARTS = known(
    "type text refusal thinking closed uuid image_pil prompt_cache_breakpoint image_embeds audio_embeds",
    image_url=known("url detail"),
    audio_url=known("url"),
    video_url=known("url"),
    input_audio=known("data format"),
    file=known("file_data file_id filename"),
    cache_control=_CACHE,
)
"""A part of a message. Which of them are served is decided where the part is read."""
_CALLS = known("id type index", function=known("name arguments"), custom=known("name input"))
_FUNCTION = known("name description parameters strict")
TOOLS = KnownFields(
    known("type", function=_FUNCTION, cache_control=_CACHE).fields, types=frozenset({"function"})
)
TOOL_CHOICE = known(
    "type",
    function=known("name"),
    custom=known("name"),
    allowed_tools=known("mode tools"),
)


class ChatMessage(RequestObject):
    """One message. Fields besides these reach the template as they are."""

    also_known: ClassVar[Mapping[str, KnownFields | None]] = {
        "content": PARTS,
        "tool_calls": _CALLS,
        "cache_control": _CACHE,
        "tools": TOOLS,
        **known("refusal annotations", audio=known("id expires_at data transcript")).fields,
        **known(
            "reasoning_details thinking tool_plan", function_call=known("name arguments")
        ).fields,
    }
    """Fields of OpenAI, of common templates, and of other servers' answers that clients send back."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Text | Annotated[list[Text | FreeObject], Field(max_length=4096)] | None = Field(
        None, description="A text, or a list of text parts."
    )
    name: ShortText | None = None
    tool_call_id: ShortText | None = None
    tool_calls: Annotated[list[FreeObject], Field(max_length=1024)] | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=16384)]


REPORTED_OTHERWISE: Mapping[str, Refusal] = {
    **CHAT_REFUSALS,
    "mm_processor_kwargs": Refusal("is served by /v1/chat/completions"),
    "n": Refusal("an answer is one here", 1),
    "best_of": Refusal("an answer is one here", 1),
    "use_beam_search": Refusal("is served by /v1/chat/completions and /v1/completions", False),
    "length_penalty": Refusal("belongs to use_beam_search, which is not supported here", 1, 1.0),
    "echo": Refusal("the answer of this route has no prompt", False),
    "prompt_logprobs": Refusal("the answer has no field for it; use /v1/chat/completions"),
    "return_token_ids": Refusal("the answer has no place for it", False),
    "return_weights_version": Refusal("the answer has no place for it", False),
    "kv_transfer_params": Refusal("is not supported here; use /v1/chat/completions"),
    "add_generation_prompt": Refusal("the last message decides it", True),
    "continue_final_message": Refusal("the last message decides it", False),
}
"""Fields of a chat that other wires for conversations cannot serve, whatever their own names."""


class ChatRequest(TemplateExtensions, SamplingBody):
    """Answer a conversation."""

    refused: ClassVar[Mapping[str, Refusal]] = CHAT_REFUSALS
    also_known: ClassVar[Mapping[str, KnownFields | None]] = {
        "tools": TOOLS,
        "tool_choice": TOOL_CHOICE,
        "prediction": known("type", content=PARTS),
    }

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="Deprecated: max_completion_tokens."
    )
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="Null: until the context is full."
    )
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    tools: Annotated[list[FreeObject], Field(max_length=1024)] | None = None
    tool_choice: ShortText | FreeObject | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    reasoning_effort: Effort | None = Field(
        None,
        description="Passed to the chat template. none also sets enable_thinking and thinking to "
        "false there.",
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="Passed to the chat template."
    )
    store: bool = Field(False, description="Has no effect: answers of chats are not stored.")
    mm_processor_kwargs: FreeObject | None = Field(
        None, description="Options of the model's media processor, for the media of the messages."
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    _tool_paths: list[str] = PrivateAttr(default_factory=list)
    _sent_choice: str | Mapping[str, Any] | None = PrivateAttr(None)

    def check_fields(self, state: ServerState, within: str = "") -> None:
        """Check the fields of all bodies, and leave out tools that are not functions."""
        super().check_fields(state, within)
        if self.tools:
            self._leave_out_tools(state)

    def _leave_out_tools(self, state: ServerState) -> None:
        kept = without_foreign(self.tools or (), state.left_out.note)
        paths = self.tool_paths
        self._tool_paths = [paths[index] for index, _ in kept]
        if not kept and self.tool_choice == "auto":
            self.tool_choice = None
        self.tools = [dict(tool) for _, tool in kept] or None

    @property
    def tool_paths(self) -> list[str]:
        """Places of the tools' schemas in the client's request, for errors."""
        given = range(len(self.tools or ()))
        return self._tool_paths or [f"tools[{index}].function.parameters" for index in given]

    @property
    def sent_choice(self) -> str | Mapping[str, Any] | None:
        """``tool_choice`` in the client's words, for errors."""
        return self.tool_choice if self._sent_choice is None else self._sent_choice

    def name_tools(
        self, paths: Sequence[str], choice: str | Mapping[str, Any] | None = None
    ) -> None:
        """Say how the tools stand in the request of another protocol.

        Args:
            paths: places of the tools' schemas, one per tool.
            choice: ``tool_choice`` as the client sent it; None: as it is here.
        """
        self._tool_paths, self._sent_choice = list(paths), choice


class FunctionCall(BaseModel):
    """A call's function."""

    name: str
    arguments: str


class ToolCallOut(BaseModel):
    """A tool call of an answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatAnswer(BaseModel):
    """The message of a choice."""

    role: str
    content: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCallOut] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @model_serializer(mode="wrap")
    def _without_empty_calls(self, make: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without calls there is no ``tool_calls``: clients take a null for a list."""
        made: dict[str, Any] = make(self)
        if self.tool_calls is None:
            made.pop("tool_calls", None)
        return made


class TokenLogprob(BaseModel):
    """One token."""

    token: str
    """The token's text by itself; a part of a character is U+FFFD."""
    logprob: float
    bytes: list[int] | None
    """Bytes that the token adds to the text, possibly a part of a character; null: the server has
    no tokenizer."""


class ContentLogprob(TokenLogprob):
    """One chosen token and its rivals."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of an answer's tokens."""

    content: list[ContentLogprob]


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatResponse(BaseModel):
    """Answer of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: None = None
    system_fingerprint: str
    prompt_logprobs: PromptLogprobsField | None = None
    prompt_token_ids: list[int] | None = None
    weights_versions: list[str] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class ChunkFunction(Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ChunkToolCall(Struct, omit_defaults=True):
    index: int
    id: str | None = None
    type: str | None = None
    function: ChunkFunction | None = None


class ChunkDelta(Struct):
    """New parts of an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChunkToolCall] | UnsetType = UNSET


class ChunkToken(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChunkContentLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[ChunkToken]


class ChunkChatLogprobs(Struct):
    content: list[ChunkContentLogprob]


class ChatChunkChoice(Struct):
    index: int
    delta: ChunkDelta
    logprobs: ChunkChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    """One event of a streamed answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Any = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    weights_versions: list[str] | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
