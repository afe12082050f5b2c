"""From the wire to core types, refusing by field name what cannot be honoured."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, cast

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from headrace_core.context import ENGINE
from headrace_core.engine import EngineClient
from headrace_core.errors import RequestError, UnknownModel, UnsupportedFeature
from headrace_core.request import (
    MEDIA_PARTS,
    ChatPrompt,
    Prompt,
    TextPrompt,
    TokensPrompt,
    modality_of,
)
from headrace_core.sampling.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from headrace_core.served_model import ServedModel
from headrace_server.chat.tool_choice import check_tools
from headrace_server.engines_here import num_engines_here
from headrace_server.errors.places import place_in
from headrace_server.http.middleware import is_request_id
from headrace_server.protocols.base import MAX_SEQUENCES, check_size
from headrace_server.protocols.openai.bodies.chat import ChatMessage, ChatRequest
from headrace_server.protocols.openai.bodies.completions import CompletionRequest
from headrace_server.protocols.openai.bodies.pooling import ChatInput
from headrace_server.protocols.openai.bodies.sampling import (
    KVTransferParams,
    SamplingBody,
    SamplingFields,
)
from headrace_server.protocols.openai.bodies.tokenize import TokenizeChatRequest
from headrace_server.requests.prompt_embeds import decode_embeds
from headrace_server.settings import ServerSettings
from headrace_server.state import ServerState

_TEXT_PARTS: Mapping[str, str] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MEDIA_KEYS = (
    "image_url", "image_pil", "image_embeds", "audio_url", "input_audio", "audio_embeds",
    "video_url", "input_image", "input_file", "file",
)  # fmt: skip
_UNSAID = ("image_pil", "image_embeds", "audio_embeds")
"""Parts that no client can send, or that need a flag: errors do not propose them."""
CLIENT_PLACE = "_place"
"""Key of a part with media that another protocol's request becomes: where its content stands there. The
engine names it in errors."""
_RESERVED_TEMPLATE_KWARGS = frozenset(
    {"chat_template", "messages", "tools", "documents", "tokenize", "add_generation_prompt",
     "continue_final_message"}
)  # fmt: skip


def check_model(name: str | None, model: ServedModel) -> None:
    """Raises UnknownModel unless ``name`` is None or a served name."""
    if name is not None and name not in model.names:
        served = ", ".join(map(repr, model.names))
        raise UnknownModel(f"model {name!r} is not served; served: {served}", param="model")


def answer_id(prefix: str, wanted: str | None, request: Request) -> str:
    """The id of an answer: prefix and the client's id (header before field), or a random one.

    Raises:
        RequestError: the field ``request_id`` has other characters than letters, digits, ``-_.:``.
    """
    if wanted is not None and not is_request_id(wanted):
        raise RequestError(
            f"request_id = {wanted[:64]!r}: must be 1 to 128 letters, digits, '-', '_', '.', ':'",
            param="request_id",
        )
    if wanted is None or "x-request-id" in request.headers:
        wanted = request.scope["headrace_request_id"]
    return f"{prefix}{wanted}"


def engine_id(answer: str, position: int) -> str:
    """Id of one prompt inside the engine: never twice, whatever clients send."""
    return f"{answer}-{position}-{uuid.uuid4().hex[:8]}"


def choose_engine(request: Request, engine: EngineClient) -> None:
    """Note for the engine, in the context of the request's task, which of several the client asks for.

    Raises:
        RequestError: there is no engine of that rank.
    """
    rank = request.headers.get("x-data-parallel-rank")
    if rank is None:
        return
    count = num_engines_here(engine.settings)
    if rank not in map(str, range(count)):
        raise RequestError(
            f"header X-data-parallel-rank = {rank[:16]!r}: must be the number of an engine, "
            + ("0: this server has one" if count == 1 else f"0 to {count - 1}"),
            param="X-data-parallel-rank",
        )
    ENGINE.set(int(rank))


def sampling_params(
    body: SamplingFields,
    model: ServedModel,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    stream: bool,
    detokenize: bool = True,
    extra_args: dict[str, Any] | None = None,
    constraint: StructuredOutputsParams | None = None,
    keep_special_tokens: bool = False,
    searches: bool = False,
) -> SamplingParams:
    """Sampling parameters of a body; what it leaves out comes from the model's defaults.

    Args:
        searches: beams are searched, nothing is sampled; the parameters only describe the request.
        keep_special_tokens: whatever the body says: a parser reads them.

    Raises:
        RequestError: naming the field.
    """
    cap = model.default_sampling_params.get("max_tokens")
    if cap is not None:
        max_tokens = cap if max_tokens is None else min(max_tokens, cap)
    values: dict[str, Any] = {
        name: value for name, value in model.default_sampling_params.items() if name != "max_tokens"
    }
    for name in _COPIED & body.model_fields_set:
        values[name] = getattr(body, name)
    values["stop"] = body.stop or values.get("stop")
    if keep_special_tokens:
        values["skip_special_tokens"] = False
    if searches:
        values["temperature"] = 1.0  # several greedy completions would be refused
    return SamplingParams.from_optional(
        **values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=_logit_bias(body.logit_bias, model.vocab_size),
        extra_args=extra_args,
        structured_outputs=constraint,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        detokenize=detokenize and model.has_tokenizer,
    )


_COPIED = frozenset(
    {
        "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
        "presence_penalty", "seed", "stop_token_ids", "min_tokens", "include_stop_str_in_output",
        "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
        "truncate_prompt_tokens", "allowed_token_ids", "bad_words",
        "thinking_token_budget",
    }
)  # fmt: skip


def check_shared(body: SamplingBody, model: ServedModel) -> None:
    """Fields of completions and chats that must agree with each other or with the server.

    Raises:
        RequestError: naming the field.
    """
    check_streaming(body.stream, body.stream_options, body.prompt_logprobs)
    check_priority(body.priority, model)
    if body.best_of is not None and body.best_of != body.n:
        raise UnsupportedFeature(
            f"best_of = {body.best_of}: must equal n = {body.n}; ask for as many completions as "
            "you want to choose from",
            param="best_of",
        )
    if body.length_penalty != 1.0 and not body.use_beam_search:
        raise RequestError(
            f"length_penalty = {body.length_penalty:g}: needs use_beam_search",
            param="length_penalty",
        )


def tokens_as_ids(body: SamplingBody, settings: ServerSettings) -> bool:
    """True if log-probabilities show tokens as ``token_id:N``."""
    wanted = body.return_tokens_as_token_ids
    return settings.return_tokens_as_token_ids if wanted is None else wanted


def check_streaming(stream: bool, options: object, prompt_logprobs: int | None) -> None:
    """Raises RequestError for what belongs to streams only, or to whole answers only."""
    if options is not None and not stream:
        raise RequestError("stream_options: only allowed with stream", param="stream_options")
    if stream and prompt_logprobs is not None:
        raise RequestError("prompt_logprobs: not available with stream", param="prompt_logprobs")


def check_priority(priority: int, model: ServedModel) -> None:
    """Raises RequestError unless the priority is 0 or the engine knows priorities."""
    if priority != 0 and not model.priority_scheduling:
        raise RequestError(
            f"priority = {priority}: must be 0 unless the server runs with "
            "--scheduling-policy priority",
            param="priority",
        )


def check_logprobs(name: str, value: int | None, model: ServedModel) -> None:
    """Raises RequestError, under the client's field name, if the server allows fewer."""
    limit = model.max_logprobs
    if value is not None and limit != -1 and (value > limit or value == -1):
        raise RequestError(
            f"{name} = {value}: must be at most {limit} (--max-logprobs)", param=name, value=value
        )


def _logit_bias(bias: Mapping[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not bias:
        return None
    result = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise RequestError(
                f"logit_bias: key {key[:32]!r} must be a token id below {vocab_size}",
                param="logit_bias",
            )
        result[int(key)] = max(-100.0, min(100.0, value))
    return result


def _extra_args(body: SamplingBody) -> dict[str, Any] | None:
    transfer = transfer_args(body.kv_transfer_params, stream=body.stream)
    return {**(body.vllm_xargs or {}), **(body.headrace_xargs or {}), **transfer} or None


def transfer_args(params: KVTransferParams | None, *, stream: bool) -> dict[str, Any]:
    """The engine's extra arguments of KV transfer; {}: there are none.

    Raises:
        RequestError: a stream cannot tell where blocks are.
    """
    if params is None:
        return {}
    if params.do_remote_decode and stream:
        raise RequestError(
            "kv_transfer_params.do_remote_decode: not available with stream",
            param="kv_transfer_params",
        )
    return params.as_extra_args()


# Completions


def completion_params(
    body: CompletionRequest, model: ServedModel, constraint: StructuredOutputsParams | None
) -> SamplingParams:
    """Sampling parameters of a completion. ``max_tokens`` 0 runs one token that is not shown."""
    check_shared(body, model)
    check_logprobs("logprobs", body.logprobs, model)
    check_logprobs("prompt_logprobs", body.prompt_logprobs, model)
    if body.max_tokens == 0 and not body.echo:
        raise RequestError(
            "max_tokens = 0: must be at least 1; 0 only with echo", param="max_tokens", value=0
        )
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        asked = -1 if prompt_logprobs == -1 else max(prompt_logprobs or 0, body.logprobs)
        prompt_logprobs = asked
    return sampling_params(
        body,
        model,
        max_tokens=1 if body.max_tokens == 0 else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        stream=body.stream,
        extra_args=_extra_args(body),
        constraint=constraint,
        searches=body.use_beam_search,
    )


def completion_prompts(body: CompletionRequest, model: ServedModel) -> list[Prompt]:
    """The prompts of a completion, one or many; embeddings first.

    Raises:
        RequestError: there is none, or prompts times ``n`` is above the bound.
    """
    embeds = decode_embeds(body.prompt_embeds, enabled=model.prompt_embeds)
    if embeds:
        _check_with_embeds(body)
    given: Any = body.prompt
    many: Sequence[Any]
    if given is None:
        many = []
    elif isinstance(given, str) or isinstance(given[0], int):
        many = [given]
    else:
        many = given
    if not embeds and not many:
        raise RequestError("prompt: must be given", param="prompt")
    if (len(embeds) + len(many)) * body.n > MAX_SEQUENCES:
        raise RequestError(
            f"prompt: {len(embeds) + len(many)} prompts times n = {body.n} exceeds {MAX_SEQUENCES}",
            param="prompt",
        )
    first = [_embeds_prompt(data, body.cache_salt) for data in embeds]
    return first + [_prompt(one, body.cache_salt) for one in many]


def _check_with_embeds(body: CompletionRequest) -> None:
    """Refuse what a prompt without tokens cannot give."""
    asked = {"echo": body.echo, "prompt_logprobs": body.prompt_logprobs is not None,
             "use_beam_search": body.use_beam_search}  # fmt: skip
    for name in (name for name, value in asked.items() if value):
        raise UnsupportedFeature(
            f"{name}: cannot be combined with prompt_embeds: embeddings have no tokens", param=name
        )


def _embeds_prompt(data: bytes, salt: str | None) -> Prompt:
    prompt: dict[str, Any] = {"prompt_embeds": data}
    if salt is not None:
        prompt["cache_salt"] = salt
    return cast(Prompt, prompt)


def _prompt(given: str | list[int], salt: str | None) -> Prompt:
    if isinstance(given, str):
        text = TextPrompt(prompt=given)
        if salt is not None:
            text["cache_salt"] = salt
        return text
    tokens = TokensPrompt(prompt_token_ids=given)
    if salt is not None:
        tokens["cache_salt"] = salt
    return tokens


# Chats


def as_chat(values: dict[str, Any], spelling: Mapping[str, str]) -> ChatRequest:
    """A request of another protocol as a chat.

    Args:
        values: the chat's fields.
        spelling: of these -> the client's.

    Raises:
        RequestValidationError: naming the field as the client spells it.
    """
    try:
        return ChatRequest.model_validate(values)
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            place = place_in(values, problem["loc"], problem["type"]) or problem["loc"]
            where = ("body", *_respelled(place, spelling))
            problems.append({**problem, "loc": where})
        raise RequestValidationError(problems) from error


def _respelled(place: Sequence[str | int], spelling: Mapping[str, str]) -> tuple[str | int, ...]:
    """A place of the chat as the client spells it: by the longest of its beginnings that has a spelling."""
    for end in range(len(place), 0, -1):
        theirs = spelling.get(".".join(map(str, place[:end])))
        if theirs is not None:
            return (*theirs.split("."), *place[end:])
    return tuple(place)


def chat_params(
    body: ChatRequest,
    model: ServedModel,
    constraint: StructuredOutputsParams | None = None,
    *,
    keep_special_tokens: bool = False,
) -> SamplingParams:
    """Sampling parameters of a chat."""
    check_shared(body, model)
    if body.top_logprobs and not body.logprobs:
        raise RequestError(
            f"top_logprobs = {body.top_logprobs}: needs logprobs = true", param="top_logprobs"
        )
    check_logprobs("top_logprobs", body.top_logprobs, model)
    check_logprobs("prompt_logprobs", body.prompt_logprobs, model)
    limit = body.max_completion_tokens
    return sampling_params(
        body,
        model,
        max_tokens=limit if limit is not None else body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        stream=body.stream,
        extra_args=_extra_args(body),
        constraint=constraint,
        keep_special_tokens=keep_special_tokens,
        searches=body.use_beam_search,
    )


def chat_prompt(
    body: ChatRequest | TokenizeChatRequest | ChatInput,
    state: ServerState,
    *,
    salt: str | None = None,
    with_tools: bool = True,
    effort: str | None = None,
    verbosity: str | None = None,
) -> ChatPrompt:
    """The conversation, its messages brought to one form.

    Args:
        salt: keeps its cached blocks apart.
        with_tools: False leaves the tools out.
        effort: ``reasoning_effort``, which templates read as a variable.
        verbosity: likewise.

    Raises:
        RequestError: naming the message and part.
    """
    settings = state.settings
    if body.chat_template is not None and not settings.trust_request_chat_template:
        raise UnsupportedFeature(
            "chat_template: this server accepts no templates from requests "
            "(--trust-request-chat-template is off)",
            param="chat_template",
        )
    kwargs = body.chat_template_kwargs or {}
    check_size("chat_template_kwargs", kwargs)
    check_size("documents", body.documents or [])
    if body.tools:
        check_tools(body.tools, body.tool_paths if isinstance(body, ChatRequest) else ())
    for name in sorted(_RESERVED_TEMPLATE_KWARGS & kwargs.keys()):
        raise RequestError(
            f"chat_template_kwargs: {name!r} is set by another field or by the server",
            param="chat_template_kwargs",
        )
    options = body.mm_processor_kwargs if isinstance(body, ChatRequest | ChatInput) else None
    if options and not state.engine.model.modalities:
        raise UnsupportedFeature(
            "mm_processor_kwargs: this model takes text only", param="mm_processor_kwargs"
        )
    check_size("mm_processor_kwargs", options or {})
    return ChatPrompt(
        messages=[
            _message(i, message, state.engine.model.modalities)
            for i, message in enumerate(body.messages)
        ],
        tools=(body.tools or None) if with_tools else None,
        chat_template=body.chat_template,
        chat_template_kwargs={
            **settings.default_chat_template_kwargs,
            **_effort_kwargs(effort),
            **({} if verbosity is None else {"verbosity": verbosity}),
            **kwargs,
        },
        content_format=settings.chat_template_content_format,
        add_generation_prompt=_generation_prompt(body),
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        documents=body.documents,
        cache_salt=salt,
        mm_processor_kwargs=options,
    )


def _effort_kwargs(effort: str | None) -> dict[str, Any]:
    """Template variables of a reasoning effort. ``none`` turns the switches that families have."""
    if effort is None:
        return {}
    off = {"enable_thinking": False, "thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **off}


def _generation_prompt(body: ChatRequest | TokenizeChatRequest | ChatInput) -> bool:
    """True if a new message is opened. Continuing the last one replaces the default."""
    if not body.continue_final_message:
        return body.add_generation_prompt
    if body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
        raise RequestError(
            "continue_final_message: cannot be combined with add_generation_prompt",
            param="continue_final_message",
        )
    return False


def _message(index: int, message: ChatMessage, modalities: Sequence[str]) -> dict[str, Any]:
    where = f"messages[{index}]"
    check_size(where, message.model_extra or {})
    result: dict[str, Any] = dict(message.model_extra or {})
    result["role"] = message.role
    if message.content is None:
        _check_absent_content(where, message)
    result["content"] = _content(where, message.content, modalities)
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            result[name] = value
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        result["reasoning"] = result["reasoning_content"] = reasoning
    if message.tool_calls:
        check_size(where, message.tool_calls)
        result["tool_calls"] = message.tool_calls
    return result


_SAYS_SOMETHING: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("user", "system", "developer", "tool", "function"), frozenset()),
    "assistant": frozenset(
        {"tool_calls", "function_call", "refusal", "audio", "reasoning", "reasoning_content",
         "reasoning_details", "thinking", "tool_plan"}
    ),
}  # fmt: skip
"""Roles whose messages need content -> fields that may stand in its place. Templates define others."""


def _check_absent_content(where: str, message: ChatMessage) -> None:
    """Raises RequestError if a message says nothing: it has neither content nor what may replace it."""
    instead = _SAYS_SOMETHING.get(message.role)
    if instead is None:
        return
    extra = message.model_extra or {}
    if any(getattr(message, name, None) or extra.get(name) for name in instead):
        return
    other = ", or tool_calls in its place" if instead else ""
    raise RequestError(
        f"{where}.content: must be given for role {message.role!r}: a text or a list of parts{other}",
        param=f"{where}.content",
    )


def _content(where: str, content: Any, modalities: Sequence[str]) -> Any:
    if content is None or isinstance(content, str):
        return content
    return content_parts(where, content, modalities)


def content_parts(
    where: str, parts: Sequence[Any], modalities: Sequence[str]
) -> list[dict[str, Any]]:
    """Parts of a message or of an object with ``content``: text in its one form, and media.

    Args:
        where: the object's place.
        modalities: that the model takes.

    Raises:
        RequestError: a part is neither; names the place.
    """
    return [_part(f"{where}.content[{i}]", part, modalities) for i, part in enumerate(parts)]


def _part(where: str, part: Any, modalities: Sequence[str]) -> dict[str, Any]:
    typed = part
    if isinstance(part, dict) and "type" not in part:
        kind = next((kind for kind in MEDIA_PARTS if kind in part), None)
        typed = part if kind is None else {"type": kind, **part}
    taken = modality_of(typed) in modalities and typed["type"] != "image_pil"
    return typed if taken else text_part(where, part, modalities)


def text_part(
    where: str, part: str | dict[str, Any], modalities: Sequence[str] = ()
) -> dict[str, str]:
    """A part of a message in its one form.

    Args:
        where: the part's place.
        modalities: that parts may bring beside text, for messages.

    Raises:
        RequestError: it is no text; names the place.
    """
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type")
    if kind is None:
        kind = next((key for key in (*_TEXT_PARTS, *_MEDIA_KEYS) if key in part), None)
    if kind in _MEDIA_KEYS and CLIENT_PLACE in part:
        place = str(part[CLIENT_PLACE])
        raise UnsupportedFeature(f"{place}: this model takes text only", param=place)
    taken = [own for own, m in MEDIA_PARTS.items() if m in modalities and own not in _UNSAID]
    if kind in _MEDIA_KEYS:
        accepted = (
            f"must be one of text, {', '.join(taken)}" if taken else "this model takes text only"
        )
        raise UnsupportedFeature(
            f"{where}: parts of type {kind!r} are not supported; {accepted}",
            param=f"{where}.type" if "type" in part else where,
        )
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise RequestError(
            f"{where}: type = {str(kind)[:64]!r} must be one of {[*sorted(_TEXT_PARTS), *taken]}",
            param=f"{where}.type",
        )
    text = part.get(key)
    if not isinstance(text, str):
        raise RequestError(f"{where}.{key}: must be a string", param=f"{where}.{key}")
    return {"type": "text", "text": text}
