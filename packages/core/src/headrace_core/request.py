"""Prompts as callers give them, and a request as the engine's core takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NotRequired, TypedDict

from headrace_core.grammar import Constraint
from headrace_core.lora import LoRARequest
from headrace_core.multimodal import MediaInput, Modality
from headrace_core.pooling import PoolingParams
from headrace_core.sampling.params import SamplingParams

MediaData = Mapping[str, Any]
"""Modality -> one item or a list. ``audio``: (waveform [samples] or [channels, samples] float32 numpy
array, samples a second); the waveform alone has the model's own rate. ``image``: PIL's or uint8. ``video``:
frames, a list of PIL's images or uint8 [frames, height, width, 3]; or (frames, metadata)."""


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[MediaData]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    """Options of the model's media processor."""
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    """Modality -> a name or a list of them: an item that has one, and that is kept, may be None."""


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[MediaData]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    token_type_ids: NotRequired[list[int]]
    """Pooling models that tell the texts of a pair apart: which text each token belongs to."""


class EncoderDecoderPrompt(TypedDict):
    """Prompt of an encoder-decoder model: the encoder's input, and the beginning of the decoder's output.

    The same as the decoder's prompt with the encoder's ``multi_modal_data``.
    """

    encoder_prompt: str | TextPrompt | TokensPrompt
    """Its media; its text must be empty for models whose encoder reads none."""
    decoder_prompt: str | list[int] | TextPrompt | TokensPrompt | None


class EmbedsPrompt(TypedDict):
    """A prompt as input embeddings, one row a token, for an engine that enables them."""

    prompt_embeds: Any
    """A torch tensor [num_tokens, hidden size], float32, bfloat16 or float16; or the bytes of a file
    that holds one: of ``torch.save``, or of safetensors. One leading dimension of 1 is dropped."""
    cache_salt: NotRequired[str]


MEDIA_PARTS: Mapping[str, Modality] = {
    "input_audio": "audio", "audio_url": "audio", "image_url": "image", "image_pil": "image",
    "video_url": "video", "image_embeds": "image", "audio_embeds": "audio",
}  # fmt: skip
"""Type of a chat message's part that brings media -> its modality."""


def modality_of(part: object) -> Modality | None:
    """Modality of a chat message's part; None: it brings no media. Its form is not checked."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return MEDIA_PARTS.get(kind) if isinstance(kind, str) else None


def brings_media(prompt: Prompt) -> bool:
    """True if a prompt has more than text or tokens for the model; its form is not checked."""
    if isinstance(prompt, ChatPrompt):
        contents = (message.get("content") for message in prompt.messages
                    if isinstance(message, Mapping))  # fmt: skip
        parts = (part for content in contents if isinstance(content, list) for part in content)
        return any(modality_of(part) for part in parts)
    if not isinstance(prompt, Mapping):
        return False
    return prompt.get("multi_modal_data") is not None or "encoder_prompt" in prompt


EMBEDS_DTYPES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""
ROW_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Checked input embeddings on their way to the workers: header and raw bytes.

    Raises:
        ValueError: header and bytes contradict each other.
    """

    dtype: str
    """One of :data:`EMBEDS_DTYPES`: the activations'."""
    num_tokens: int
    hidden_size: int
    data: bytes
    """[num_tokens, hidden_size], row by row, in the machine's byte order; all finite."""
    row_digests: bytes
    """SHA-256 of each row: cached blocks are found by content, as those of token ids are."""

    def __post_init__(self) -> None:
        if self.dtype not in EMBEDS_DTYPES:
            raise ValueError(f"dtype = {self.dtype!r}: must be one of {list(EMBEDS_DTYPES)}")
        if self.num_tokens < 1 or self.hidden_size < 1:
            raise ValueError(f"shape [{self.num_tokens}, {self.hidden_size}]: must not be empty")
        size = self.num_tokens * self.hidden_size * EMBEDS_DTYPES[self.dtype]
        if len(self.data) != size:
            raise ValueError(f"{len(self.data)} bytes instead of {size}")
        if len(self.row_digests) != self.num_tokens * ROW_DIGEST_BYTES:
            raise ValueError(f"{len(self.row_digests)} bytes of digests")

    @classmethod
    def of(cls, dtype: str, num_tokens: int, hidden_size: int, data: bytes) -> PromptEmbeds:
        """With digests computed here."""
        size = len(data) // max(1, num_tokens)
        rows = (data[i * size : (i + 1) * size] for i in range(num_tokens))
        digests = b"".join(sha256(row).digest() for row in rows)
        return cls(dtype, num_tokens, hidden_size, data, digests)

    def last(self, num_tokens: int) -> PromptEmbeds:
        """The last rows only."""
        skip = self.num_tokens - num_tokens
        if skip <= 0:
            return self
        start = skip * self.hidden_size * EMBEDS_DTYPES[self.dtype]
        digests = self.row_digests[skip * ROW_DIGEST_BYTES :]
        return PromptEmbeds(self.dtype, num_tokens, self.hidden_size, self.data[start:], digests)

    def digests(self, start: int, end: int) -> str:
        """Names the content of rows ``start`` to ``end``; "" if there are none."""
        return self.row_digests[start * ROW_DIGEST_BYTES : end * ROW_DIGEST_BYTES].hex()


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation that the model's chat template turns into a prompt."""

    messages: Sequence[Mapping[str, Any]]
    """OpenAI-style messages; content is text or a list of text parts."""
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    """Replaces the model's template. From a client only if the operator trusts clients."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    content_format: str = "auto"
    """``auto``, ``string`` or ``openai``: what the template expects ``content`` to be."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None
    cache_salt: str | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None


Prompt = (
    str
    | Sequence[int]
    | TextPrompt
    | TokensPrompt
    | EmbedsPrompt
    | EncoderDecoderPrompt
    | ChatPrompt
)
"""Everything that ``generate`` and ``encode`` accept as one prompt."""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Limit on a request's reasoning, after which its end is forced."""

    max_tokens: int
    """Tokens between the reasoning's start and its end."""
    end_token_ids: list[int]
    """Tokens that are forced, one after the other. Not empty."""
    start_token_ids: list[int] = field(default_factory=list)
    """Tokens that begin the reasoning; empty: the output begins with it."""


@dataclass(slots=True)
class CoreRequest:
    """A request on its way into the engine's core: token ids only, checked against the model.

    Crosses the process border as msgpack.
    """

    request_id: str
    """Unique within the engine; made by headrace, whatever a client asked for."""
    prompt_token_ids: list[int]
    params: SamplingParams
    """With ``n`` = 1: several completions are several core requests."""
    stop_token_ids: frozenset[int]
    """All tokens that end the output, EOS included."""
    max_tokens: int
    """Resolved: never past the context's end."""
    arrival_time: float
    """``time.time()`` when the request was taken in."""
    priority: int = 0
    """Lower first, under the priority policy."""
    cache_salt: str | None = None
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    """``params.bad_words`` as token sequences."""
    constraint: Constraint | None = None
    """``params.structured_outputs``, admitted: the grammar compiles."""
    prompt_embeds: PromptEmbeds | None = None
    """The prompt, if it came as embeddings; ``prompt_token_ids`` holds a 0 for each row then."""
    thinking: ThinkingBudget | None = None
    """``params.thinking_token_budget``, with what ends the reasoning."""
    owner: str = ""
    """Owner under the fair policy (:mod:`headrace_core.context`)."""
    pooling: PoolingParams | None = None
    """Verified. Given: the request ends with its prompt, whose pooled states are its result;
    ``params`` and ``max_tokens`` (which is 1) mean nothing then."""
    token_type_ids: list[int] | None = None
    """Segment of each prompt token, for models that have them; None = all 0."""
    media: list[MediaInput] = field(default_factory=list)
    """In order of their offsets."""
    whole_spans: list[tuple[int, ...]] = field(default_factory=list)
    """See :attr:`headrace_core.multimodal.MediaPlacement.whole_spans`."""
    num_encoder_tokens: int = 0
    """Length of what the encoder of an encoder-decoder model makes of ``media``."""
    num_attended_tokens: int | None = None
    """Where a model attends in both directions: only so many of the prompt's first tokens are attended
    to, at least 1. None: all."""
    lora_request: LoRARequest | None = None
    """The adapter that it is computed with; None: the base model alone."""
    data_parallel_rank: int | None = None
    """The engine that it asks for, where there are several."""
