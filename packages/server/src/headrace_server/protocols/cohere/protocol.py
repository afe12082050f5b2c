"""``POST /v2/embed``: embeddings as Cohere's clients ask for them (docs.cohere.com/reference/embed)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from headrace_server.errors.mapping import ErrorInfo
from headrace_server.protocols.base import Refusal, RequestBody, ShortText, Text, without_nulls
from headrace_server.protocols.openai.bodies.pooling import MAX_INPUTS, ContentObject

EmbeddingType = Literal["float", "base64", "binary", "ubinary", "int8", "uint8"]


class CohereEmbedRequest(RequestBody):
    """A vector for each text, in one or several forms."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        "images": Refusal("embeddings of images are not supported; send texts", []),
    }
    request_id: ClassVar[None] = None
    return_token_ids: ClassVar[None] = None

    model: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="Served model name; null: the first."
    )
    texts: Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS)] | None = Field(
        None, description="Required, by this name or as inputs."
    )
    inputs: Annotated[list[ContentObject], Field(min_length=1, max_length=MAX_INPUTS)] | None = (
        Field(
            None,
            description="The inputs as objects: their text parts are joined with line breaks into one text.",
        )
    )
    input_type: ShortText | None = Field(
        None,
        description="Purpose of the texts: search_query, search_document, classification or "
        "clustering, or the name of a prompt. The server puts the checkpoint's prompt for it before "
        "each text; null: the default prompt, if any.",
    )
    embedding_types: Annotated[list[EmbeddingType], Field(min_length=1, max_length=16)] = Field(
        ["float"], description="float, base64, binary, ubinary."
    )
    output_dimension: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="Cut vectors to so many numbers; only models that were trained for it."
    )
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="Most tokens of a text; null: as many as the model takes."
    )
    truncate: Literal["NONE", "START", "END"] = Field(
        "END", description="Side at which a text that is too long is cut; NONE: refuse it."
    )
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, data: Any) -> Any:
        return without_nulls(data)


class CohereEmbeddings(BaseModel):
    """The vectors by form; each list is in the order of the texts."""

    float_: list[list[float]] | None = Field(None, alias="float")
    base64: list[str] | None = Field(None, description="float32, little-endian.")
    binary: list[list[int]] | None = Field(
        None, description="A bit for each number, 1 if it is above 0; eight to a signed byte."
    )
    ubinary: list[list[int]] | None = Field(
        None, description="The same in unsigned bytes, 128 above those of binary."
    )


class ApiVersion(BaseModel):
    version: Literal["2"] = "2"


class BilledUnits(BaseModel):
    input_tokens: int


class CohereMeta(BaseModel):
    """The API's version, and the tokens that were read."""

    api_version: ApiVersion
    billed_units: BilledUnits


class CohereEmbedResponse(BaseModel):
    """Answer of ``POST /v2/embed``."""

    id: str
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
    embeddings: CohereEmbeddings
    texts: list[str] | None = Field(None, description="The texts, if the input was text.")
    meta: CohereMeta


class CohereErrorResponse(BaseModel):
    """Body of error answers on paths below ``/v2/``."""

    id: str = Field(description="The request's id.")
    message: str
    error: ErrorInfo
