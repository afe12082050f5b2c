"""``response_format`` and ``structured_outputs``: what form an answer must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from headrace_server.protocols.base import FreeObject, ShortText, Text
from headrace_server.protocols.known_fields import KnownFields, RequestObject, known

MAX_CHOICES = 10_000
MAX_REGEX = 8192
MAX_GRAMMAR = 1024 * 1024
"""Characters of a schema's or grammar's source."""

Source = Annotated[str, Field(max_length=MAX_GRAMMAR)]
Schema = FreeObject | StrictBool


class JsonSchema(RequestObject):
    """A named JSON schema, as OpenAI's clients send it."""

    name: ShortText | None = None
    description: Text | None = None
    schema_: Schema | None = Field(None, alias="schema", description="The schema itself.")
    strict: bool | None = Field(
        None, description="Answers always follow the schema, whatever this value is."
    )


class StructuralTag(RequestObject):
    """One constrained part of otherwise free text, in the older form."""

    begin: Source
    schema_: Schema | None = Field(None, alias="schema")
    end: Source


class ResponseFormat(RequestObject):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = Field(None, description="With type json_schema.")
    format: FreeObject | None = Field(None, description="With type structural_tag: the new form.")
    structures: Annotated[list[StructuralTag], Field(max_length=1024)] | None = Field(
        None, description="With type structural_tag: the older form, together with triggers."
    )
    triggers: Annotated[list[Source], Field(max_length=1024)] | None = None
    schema_: Schema | None = Field(
        None,
        alias="schema",
        description="With type json_object or json_schema: the schema, in place of json_schema.",
    )

    also_known: ClassVar[Mapping[str, KnownFields | None]] = known("name description strict").fields
    """Fields of a schema that is given here; they have no effect."""


class ConstraintSpellings(BaseModel):
    """Constraints as clients of other servers send them. Each is a field of :class:`StructuredOutputs`
    (:data:`headrace_server.requests.constraints.SPELLINGS`); at most one may be given."""

    json_schema: Source | Schema | None = Field(
        None, description="llama.cpp, SGLang: structured_outputs.json."
    )
    grammar: Source | None = Field(
        None, description="llama.cpp: structured_outputs.grammar, as GBNF. Empty: none."
    )
    regex: Annotated[str, Field(max_length=MAX_REGEX)] | None = Field(
        None, description="SGLang: structured_outputs.regex."
    )
    ebnf: Source | None = Field(
        None, description="SGLang: structured_outputs.grammar. Empty: none."
    )
    structural_tag: Source | FreeObject | None = Field(
        None, description="SGLang, older vLLM: structured_outputs.structural_tag."
    )
    guided_json: Source | Schema | None = Field(
        None, description="Older vLLM: structured_outputs.json."
    )
    guided_regex: Annotated[str, Field(max_length=MAX_REGEX)] | None = Field(
        None, description="Older vLLM: structured_outputs.regex."
    )
    guided_choice: Annotated[list[Source], Field(min_length=1, max_length=MAX_CHOICES)] | None = (
        Field(None, description="Older vLLM: structured_outputs.choice.")
    )
    guided_grammar: Source | None = Field(
        None, description="Older vLLM: structured_outputs.grammar."
    )
    guided_json_object: bool | None = Field(
        None, description="Older vLLM: structured_outputs.json_object."
    )
    guided_whitespace_pattern: Annotated[str, Field(max_length=MAX_REGEX)] | None = Field(
        None, description="Older vLLM: structured_outputs.whitespace_pattern; beside a constraint."
    )
    guided_decoding_backend: ShortText | None = Field(
        None,
        description="Older vLLM. The server chooses the backend; the options disable-any-whitespace "
        "and no-additional-properties have an effect, no-fallback is refused.",
    )


class StructuredOutputs(BaseModel):
    """Exactly one constraint, and options."""

    model_config = ConfigDict(extra="forbid")

    json_: Source | Schema | None = Field(
        None, alias="json", description="A JSON schema, as an object or as text."
    )
    regex: Annotated[str, Field(max_length=MAX_REGEX)] | None = Field(
        None, description="The whole output matches."
    )
    choice: Annotated[list[Source], Field(max_length=MAX_CHOICES)] | None = Field(
        None, description="The output is one of these texts."
    )
    grammar: Source | None = Field(None, description="EBNF (GBNF) or Lark.")
    json_object: bool | None = Field(None, description="True: any JSON object.")
    structural_tag: Source | FreeObject | None = Field(
        None, description="Free text with constrained parts between tags."
    )
    whitespace_pattern: Annotated[str, Field(max_length=MAX_REGEX)] | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
