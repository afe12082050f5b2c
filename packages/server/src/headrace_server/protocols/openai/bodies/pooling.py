"""``/v1/embeddings``, ``/classify``, ``/score``, ``/rerank`` and ``/pooling``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from headrace_server.protocols.base import (
    FreeObject,
    Refusal,
    RequestBody,
    ShortText,
    Text,
    TokenIds,
    fields_of,
    without_nulls,
)
from headrace_server.protocols.known_fields import KnownFields, RequestObject
from headrace_server.protocols.openai.bodies.chat import PARTS, Messages
from headrace_server.protocols.openai.bodies.usage import Usage

MAX_INPUTS = 8192
"""Texts of one request, and documents of one query."""
MAX_FIELDS = 256


def _input_form(value: Any) -> str:
    """Decide by the first item: texts and token ids are not mixed."""
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else ""
    if isinstance(first, list):
        return "<several ids>"
    return "<texts>" if isinstance(first, str) else "<ids>"


_SEVERAL = Field(min_length=1, max_length=MAX_INPUTS)
InputField = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Text], _SEVERAL, Tag("<texts>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[TokenIds], _SEVERAL, Tag("<several ids>")],
    Discriminator(_input_form),
]
Encoding = Literal["float", "base64", "bytes", "bytes_only"]
EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]
PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify", "plugin"]


class PoolingBody(RequestBody):
    """Fields of all requests for pooled results."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        "mm_processor_kwargs": Refusal("media come with messages; leave it out", {}),
        "messages": Refusal("give either input or messages, not both"),
    }  # fmt: skip

    model: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="Served model name; null: the first."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="Keep so many tokens; -1: as many as the model takes."
    )
    truncation_side: Literal["left", "right"] = Field(
        "left", description="Where the tokens are lost that truncate_prompt_tokens does not keep."
    )
    return_token_ids: bool | None = Field(
        None, description="Add prompt_token_ids to each item: the tokens as the model saw them."
    )
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    request_id: ShortText | None = None
    user: ShortText | None = Field(None, description="Has no effect.")

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, data: Any) -> Any:
        return without_nulls(data)


class TextInput(PoolingBody):
    """Texts or token ids."""

    input: InputField = Field(
        description="A text, token ids, or a list of either; each gives one item of the answer."
    )
    add_special_tokens: bool = True


class ChatInput(PoolingBody):
    """A conversation, which the chat template makes one text."""

    refused: ClassVar[Mapping[str, Refusal]] = {}
    tools: ClassVar[None] = None
    documents: ClassVar[None] = None

    messages: Messages
    mm_processor_kwargs: FreeObject | None = Field(
        None, description="Options of the model's media processor, for the media of the messages."
    )
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: Text | None = None
    chat_template_kwargs: FreeObject | None = None


class WireFields(BaseModel):
    """Encoding of numbers on the wire."""

    encoding_format: Encoding = "float"
    embed_dtype: EmbedDtype = Field("float32", description="Not with encoding_format float.")
    endianness: Endianness = Field("native", description="Not with encoding_format float.")


class VectorFields(BaseModel):
    """Fields that shape a vector, also where it is only compared with others."""

    dimensions: Annotated[int, Field(lt=2**31)] | None = Field(
        None,
        description="Cut vectors to so many numbers; only for models that were trained for it.",
    )
    normalize: bool | None = Field(None, description="Null: as the model is configured.")
    prompt_name: ShortText | None = Field(
        None,
        description="Put this prompt of the checkpoint's before each text (Sentence Transformers' "
        "prompts); null: its default one, if it has any.",
    )


class EmbedFields(VectorFields, WireFields):
    """A vector, and how it is sent."""

    sparse: bool = Field(
        False,
        description="With encoding_format float, for models with an entry for each token of the "
        "vocabulary: indices and values of those that are not 0, in place of all.",
    )


class ActivationFields(BaseModel):
    """Fields that shape a score."""

    use_activation: bool | None = Field(
        None, description="False: logits, not probabilities. Null: as the model is configured."
    )
    softmax: bool | None = Field(None, description="Deprecated: use_activation.")
    activation: bool | None = Field(None, description="Deprecated: use_activation.")


class EmbeddingTextRequest(EmbedFields, TextInput):
    """A vector for each text."""


class EmbeddingChatRequest(EmbedFields, ChatInput):
    """The vector of a conversation."""


class ClassifyTextRequest(ActivationFields, TextInput):
    """Probabilities for each text."""


class ClassifyChatRequest(ActivationFields, ChatInput):
    """Probabilities for a conversation."""


class TaskField(BaseModel):
    """Task of a request."""

    task: PoolingTask | None = Field(
        None, description="Null: token_embed, token_classify or plugin, whichever there is first."
    )


class PoolingTextRequest(TaskField, ActivationFields, EmbedFields, TextInput):
    """Pooled results of texts, of any task."""


class PoolingChatRequest(TaskField, ActivationFields, EmbedFields, ChatInput):
    """Pooled results of a conversation, of any task."""


_PLUGIN_WIRE = "the IO processor defines the JSON of the answer; leave it out"


class PluginRequest(RequestBody):
    """Data for the IO processor that the server was started with."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        "encoding_format": Refusal(_PLUGIN_WIRE, "float"),
        "embed_dtype": Refusal(_PLUGIN_WIRE, "float32"),
        "endianness": Refusal(_PLUGIN_WIRE, "native"),
    }

    data: Any = Field(description="Any JSON; the plug-in defines its form.")
    task: Literal["plugin"] | None = None
    model: Annotated[str, Field(max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    request_id: ShortText | None = None
    user: ShortText | None = Field(None, description="Has no effect.")


def _input_or_chat(value: Any) -> str:
    fields = fields_of(value)
    return "<chat>" if "messages" in fields and "input" not in fields else "<text>"


def _pooling_form(value: Any) -> str:
    fields = fields_of(value)
    is_plugin = "data" in fields and _INPUTS.isdisjoint(fields)
    return "<plugin>" if is_plugin else _input_or_chat(value)


_INPUTS = {"input", "messages"}

EmbeddingRequest = Annotated[
    Annotated[EmbeddingTextRequest, Tag("<text>")] | Annotated[EmbeddingChatRequest, Tag("<chat>")],
    Discriminator(_input_or_chat),
]
ClassifyRequest = Annotated[
    Annotated[ClassifyTextRequest, Tag("<text>")] | Annotated[ClassifyChatRequest, Tag("<chat>")],
    Discriminator(_input_or_chat),
]
PoolingRequest = Annotated[
    Annotated[PoolingTextRequest, Tag("<text>")]
    | Annotated[PoolingChatRequest, Tag("<chat>")]
    | Annotated[PluginRequest, Tag("<plugin>")],
    Discriminator(_pooling_form),
]


class TextObject(RequestObject):
    """A text as Jina's and Cohere's APIs also write it."""

    text: Text


class ContentObject(RequestObject):
    """A text in parts, as in a chat message."""

    also_known: ClassVar[Mapping[str, KnownFields | None]] = {"content": PARTS}

    content: Annotated[list[Text | FreeObject], _SEVERAL]


def _text_form(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, dict) or ("text" in value) == ("content" in value):
        return None
    return "<object>" if "text" in value else "<content>"


def _side_text_form(value: Any) -> str | None:
    form = _text_form(value)
    return None if form == "<content>" else form


def _side_form(value: Any) -> str | None:
    return "<texts>" if isinstance(value, list) else _text_form(value)


def _one_of(form: Callable[[Any], str | None], accepted: str) -> Discriminator:
    """A union's member by its form; what has none is refused with the accepted ones."""
    return Discriminator(form, custom_error_type="form", custom_error_message=f"must be {accepted}")


_OBJECT = '{"text": "..."}'
_CONTENT = '{"content": [parts]}'

SideText = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[TextObject, Tag("<object>")],
    _one_of(_side_text_form, f"a text or {_OBJECT}; media come as {_CONTENT} in place of the list"),
]
SideField = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[Annotated[list[SideText], Field(max_length=MAX_INPUTS)], Tag("<texts>")]
    | Annotated[TextObject, Tag("<object>")]
    | Annotated[ContentObject, Tag("<content>")],
    _one_of(_side_form, f"a text, {_OBJECT}, a list of those, or {_CONTENT}"),
]


class ScoreRequest(ActivationFields, VectorFields, PoolingBody):
    """Scores of pairs of texts: one with one, one with each of several, or each with its own."""

    text_1: SideField | None = Field(None, description="Required, by this name or as queries.")
    text_2: SideField | None = Field(None, description="Required, by this name or as documents.")
    queries: SideField | None = Field(None, description="The same as text_1.")
    documents: SideField | None = Field(None, description="The same as text_2.")


def _document_form(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<fields>" if isinstance(value, dict) else None


Document = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[FreeObject, Tag("<fields>")],
    _one_of(_document_form, f"a text, {_OBJECT}, or an object with the rank_fields"),
]


def _documents_form(value: Any) -> str | None:
    if isinstance(value, list):
        return "<several>"
    return _text_form(value) if isinstance(value, dict) else None


class RerankRequest(ActivationFields, VectorFields, PoolingBody):
    """Documents by how well they fit a query. The fields are Jina's and Cohere's."""

    query: Annotated[
        Annotated[Text, Tag("<text>")]
        | Annotated[TextObject, Tag("<object>")]
        | Annotated[ContentObject, Tag("<content>")],
        _one_of(_text_form, f"a text, {_OBJECT} or {_CONTENT}"),
    ]
    documents: Annotated[
        Annotated[list[Document], _SEVERAL, Tag("<several>")]
        | Annotated[TextObject, Tag("<object>")]
        | Annotated[ContentObject, Tag("<content>")],
        _one_of(
            _documents_form, f"a list of texts and of {_OBJECT}, or one {_OBJECT} or {_CONTENT}"
        ),
    ] = Field(
        description="Texts; objects with text, or with the rank_fields; one object with text; or an "
        "object with content, each part of which is one document."
    )
    top_n: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        0, description="Number of best results; 0 or null: all."
    )
    return_documents: bool | None = Field(None, description="Null: true.")
    rank_fields: Annotated[list[ShortText], Field(min_length=1, max_length=MAX_FIELDS)] | None = (
        Field(None, description="Fields to read from documents that are objects, in order.")
    )
    max_tokens_per_doc: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="Most tokens of a document; longer ones are cut."
    )
    max_chunks_per_doc: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="Has no effect: documents are never split."
    )


class Sparse(BaseModel):
    """A vector without its zeros."""

    indices: list[int]
    values: list[float]


class IndexedItem(BaseModel):
    """Fields of all items."""

    index: int
    prompt_token_ids: list[int] | None = None


class EmbeddingItem(IndexedItem):
    """One vector."""

    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str | Sparse


class PoolingItem(IndexedItem):
    """Result of one input."""

    object: Literal["pooling"] = "pooling"
    data: list[float] | list[list[float]] | str | Sparse


class ClassifyItem(IndexedItem):
    """Probabilities by label."""

    label: str | None
    probs: list[float]
    num_classes: int


class ScoreItem(IndexedItem):
    """Score of one pair."""

    object: Literal["score"] = "score"
    score: float


class ListAnswer(BaseModel):
    """Fields of answers with a list of items."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: Usage


class EmbeddingResponse(ListAnswer):
    """Answer of ``POST /v1/embeddings``."""

    data: list[EmbeddingItem]


class PoolingResponse(ListAnswer):
    """Answer of ``POST /pooling``."""

    data: list[PoolingItem]


class PluginResponse(BaseModel):
    """Answer of ``POST /pooling`` by an IO processor, which may add fields."""

    model_config = ConfigDict(extra="allow")

    request_id: str
    created_at: int
    data: Any


class ClassifyResponse(ListAnswer):
    """Answer of ``POST /classify``."""

    data: list[ClassifyItem]


class ScoreResponse(ListAnswer):
    """Answer of ``POST /score``."""

    data: list[ScoreItem]


class RerankResult(BaseModel):
    """One document's place. ``index`` is that in the request."""

    index: int
    document: FreeObject | None = None
    relevance_score: float
    prompt_token_ids: list[int] | None = None


class RerankUsage(BaseModel):
    """Tokens of a rerank."""

    prompt_tokens: int
    total_tokens: int


class RerankResponse(BaseModel):
    """Answer of ``POST /rerank``."""

    id: str
    model: str
    usage: RerankUsage
    results: list[RerankResult]
