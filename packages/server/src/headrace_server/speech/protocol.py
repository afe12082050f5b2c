"""``POST /v1/audio/transcriptions`` and ``/v1/audio/translations``: forms in, JSON or text out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType
from pydantic import AliasChoices, BaseModel, Field

from headrace_core.speech.transcription import Segment, Word
from headrace_server.protocols.base import Refusal, RequestBody, ShortText
from headrace_server.protocols.openai.bodies.sampling import Xargs

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
Language = Annotated[str, Field(max_length=32)]
Temperature = Annotated[float, Field(ge=0, le=1)]

_SAMPLING = Refusal("only transcriptions take it; leave it out")
_SPEAKERS = Refusal("the server does not distinguish speakers; leave it out")


class SpeechRequest(RequestBody):
    """The fields of both routes' forms. An empty field is one that was left out."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        "chunking_strategy": Refusal("long audio is always cut where it is quietest", "auto"),
        "include[]": Refusal("log-probabilities of tokens are not supported here"),
        "known_speaker_names[]": _SPEAKERS,
        "known_speaker_references[]": _SPEAKERS,
    }

    model: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="Served model name; left out: the first."
    )
    language: Language | None = Field(
        None, description="Spoken language (ISO 639-1); left out: the model detects it if it can."
    )
    to_language: Language | None = Field(
        None, description="Output language, for models that can choose."
    )
    prompt: Annotated[str, Field(max_length=1 << 18)] = Field(
        "", description="Preceding text, or an example of the style."
    )
    response_format: ResponseFormat = "json"
    temperature: Temperature = Field(
        0.0, description="0: greedy, with retries at up to 1 where the result looks wrong."
    )
    temperatures: Annotated[list[Temperature], Field(min_length=1, max_length=16)] | None = Field(
        None,
        alias="temperature[]",
        description="Temperatures to try in order; replaces temperature.",
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="Of each clip; left out: until the context is full."
    )
    stream: bool = False
    stream_include_usage: bool = False
    stream_continuous_usage_stats: bool = False
    request_id: ShortText | None = None


class TranscriptionRequest(SpeechRequest):
    """Write down what is said, in its own language."""

    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    timestamp_granularities: Annotated[
        list[Literal["word", "segment"]], Field(max_length=2)
    ] = Field(
        [],
        validation_alias=AliasChoices("timestamp_granularities[]", "timestamp_granularities"),
        serialization_alias="timestamp_granularities[]",
        description="With verbose_json; left out: segment.",
    )  # fmt: skip
    headrace_xargs: Xargs | None = Field(None, description="JSON, for plug-ins.")
    vllm_xargs: Xargs | None = Field(None, description="The same as headrace_xargs.")


class TranslationRequest(SpeechRequest):
    """Write down what is said in another language."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        **SpeechRequest.refused,
        **dict.fromkeys(
            ("top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
             "presence_penalty", "timestamp_granularities[]", "timestamp_granularities",
             "headrace_xargs", "vllm_xargs"),
            _SAMPLING,
        ),
    }  # fmt: skip


LISTS = frozenset(
    {"temperature[]", "timestamp_granularities[]", "timestamp_granularities", "include[]",
     "known_speaker_names[]", "known_speaker_references[]"}
)  # fmt: skip
"""Fields that may be sent several times."""
JSON_FIELDS = frozenset({"headrace_xargs", "vllm_xargs"})


class AudioUsage(BaseModel):
    """Length of the audio."""

    type: Literal["duration"] = "duration"
    seconds: int
    """Rounded up."""


class Transcription(BaseModel):
    """Answer with ``response_format`` json."""

    text: str
    usage: AudioUsage


class VerboseTranscription(BaseModel):
    """Answer with ``response_format`` verbose_json."""

    task: Literal["transcribe", "translate"]
    language: str | None
    duration: float
    """Seconds; a number, as OpenAI answers and its clients type it."""
    text: str
    segments: list[Segment] | None
    words: list[Word] | None
    usage: AudioUsage


class ChunkDelta(Struct):
    content: str


class ChunkChoice(Struct):
    delta: ChunkDelta
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    index: int = 0


class SpeechChunk(Struct):
    """One event of a stream, for both kinds of clients: like a chat's, and with ``type`` and ``delta``
    as OpenAI's newer events have them."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    type: str | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    """With type ``transcript.text.done``: everything."""
    usage: Any = UNSET
