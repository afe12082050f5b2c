"""Requests on their way in: any prompt and its parameters -> checked core requests.

Everything that the core assumes of a request is checked here, so that nothing that a caller sends
can fail inside a step.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from headrace_core import failpoints
from headrace_core.config import StructuredOutputsConfig
from headrace_core.engine import ServedModel, TokenizedPrompt
from headrace_core.errors import (
    ConfigError,
    GenerateError,
    PromptTooLong,
    RequestError,
    UnsupportedFeature,
)
from headrace_core.grammar import Constraint, Vocabulary
from headrace_core.logits_processor import LogitsProcessor
from headrace_core.request import ChatPrompt, CoreRequest, Prompt, PromptEmbeds, ThinkingBudget
from headrace_core.sampling import SamplingParams
from headrace_core.text import ReasoningParser, Tokenizer
from headrace_engine.intake.embeds import EmbedsDecoder
from headrace_engine.intake.prepared import PreparedRequest
from headrace_engine.intake.template import ChatRenderer
from headrace_engine.structured.admission import Admission, Admitted
from headrace_engine.structured.reasoning import PROMPT_TAIL, start_of
from headrace_engine.structured.vocabulary import vocabulary_of

logger = logging.getLogger(__name__)

_PROMPT_END = 64
"""Tokens of a prompt in which a template may have begun, or ended, the reasoning."""


class _Tokens(NamedTuple):
    """A prompt of any form, as tokens."""

    ids: list[int]
    text: str | None
    cache_salt: str | None
    embeds: PromptEmbeds | None = None
    """The prompt, if it came as embeddings; ``ids`` are as many zeros then."""


class Intake:
    """Turns prompts and parameters into core requests. Thread-safe.

    Args:
        tokenizer: None: prompts must be token ids.
        model: facts and limits.
        chat_template: replaces the tokenizer's own template.
        content_format: what templates expect ``content`` to be, unless a prompt says otherwise.
        trust_request_chat_template: let prompts bring templates of their own.
        structured_outputs: backend and limits of constraints on outputs.
        processors: logits processors that the engine runs; they check requests.
        reasoning_parser: knows where the model's reasoning begins and ends; where it ends,
            constraints begin. None: the model does not reason.
        check_params: refuses what the device cannot honour.
        clock: wall-clock seconds.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        model: ServedModel,
        *,
        chat_template: str | None = None,
        content_format: str = "auto",
        trust_request_chat_template: bool = False,
        structured_outputs: StructuredOutputsConfig | None = None,
        processors: Sequence[type[LogitsProcessor]] = (),
        reasoning_parser: type[ReasoningParser] | None = None,
        check_params: Callable[[SamplingParams], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self._processors = tuple(processors)
        self._embeds = EmbedsDecoder(model) if model.prompt_embeds else None
        self._clock = clock
        self._check_device = check_params
        self._serial = itertools.count()  # next() is atomic
        self._reasoning_parser = reasoning_parser
        self._vocabulary: Vocabulary | None = None
        structured = structured_outputs or StructuredOutputsConfig()
        self._constrains_reasoning = structured.enable_in_reasoning
        self._admission = Admission(structured, self.vocabulary)
        self._renderer: ChatRenderer | None = None
        if tokenizer is not None:
            self._renderer = ChatRenderer(
                tokenizer,
                template=chat_template,
                content_format=content_format,
                trust_request_template=trust_request_chat_template,
                max_output_chars=4 * model.max_model_len + 65_536,
            )

    def close(self) -> None:
        """End the processes in which templates render, constraints compile and embeddings are read,
        if there are any; they would be started anew."""
        self._admission.close()
        if self._renderer is not None:
            self._renderer.close()
        if self._embeds is not None:
            self._embeds.close()

    def limit_context(self, max_model_len: int) -> None:
        """Take over the context that the engine could make room for, if it is shorter (0: it is not).

        To be called before the first request.
        """
        if 0 < max_model_len < self.model.max_model_len:
            self.model = dataclasses.replace(self.model, max_model_len=max_model_len)

    def default_params(self, **changes: object) -> SamplingParams:
        """Parameters as the model's generation config sets them.

        Args:
            changes: fields that a caller set; None means not set.
        """
        given = {name: value for name, value in changes.items() if value is not None}
        return SamplingParams.from_optional(**{**self.model.default_sampling_params, **given})

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        add_special_tokens: bool | None = None,
        clamp_max_tokens: bool = False,
        admitted: Admitted | None = None,
    ) -> PreparedRequest:
        """Take in one request.

        Args:
            prompt: any form.
            params: not changed; a copy is kept.
            request_id: the caller's name for it.
            priority: lower first; only under the priority policy.
            add_special_tokens: None: yes for text, as a chat says for chats.
            clamp_max_tokens: shorten ``max_tokens`` to what is left of the context instead of
                refusing more.
            admitted: what :meth:`admit` said of the constraint; None: it is asked now, which may
                take seconds.

        Raises:
            RequestError: naming the field.
            PromptTooLong: the prompt, or prompt and output, exceed the context.
        """
        arrival_time = self._clock()
        if failpoints.PLAN is not None:
            failpoints.hit("intake.prepare", request_id)
        params = params.clone()
        params.validate()
        self._check_priority(priority)
        self._check_params(params)
        tokens = self._tokens(prompt, add_special_tokens)
        ids = self._truncate(tokens.ids, params)
        self._check_prompt(ids)
        embeds = tokens.embeds
        if embeds is not None:
            _check_embeds_params(params)
            embeds = embeds.last(len(ids))
        request = PreparedRequest(
            request_id=request_id,
            prompt=tokens.text if len(ids) == len(tokens.ids) else None,
            prompt_token_ids=ids,
            params=params,
            core_requests=[],
            arrival_time=arrival_time,
        )
        serial = next(self._serial)
        stop_token_ids = params.all_stop_token_ids(self.model.eos_token_ids)
        max_tokens = self._max_tokens(len(ids), params, clamp_max_tokens)
        constraint = self._constraint(prompt, ids, params, admitted)
        bad_words = self._bad_words(params)
        thinking = self._thinking(params, ids, embeds)
        request.core_requests = [
            CoreRequest(
                # Unique by our own part, whatever a caller used as its id.
                request_id=f"{request_id}#{serial:x}" + (f".{index}" if params.n > 1 else ""),
                prompt_token_ids=ids,
                params=_completion_params(params, index),
                stop_token_ids=stop_token_ids,
                max_tokens=max_tokens,
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=tokens.cache_salt,
                bad_words_token_ids=bad_words,
                constraint=constraint,
                prompt_embeds=embeds,
                thinking=thinking,
            )
            for index in range(params.n)
        ]
        return request

    def admit(self, params: SamplingParams) -> Admitted | None:
        """Let the parameters' constraint compile, in a process that is killed if it takes long.

        May take seconds, the first constraint longer: to be called where nobody waits but the
        request itself. None: there is no constraint.

        Raises:
            RequestError: no backend can serve it; names keyword and JSON pointer.
        """
        wanted = params.structured_outputs
        if wanted is None:
            return None
        self._need_tokenizer("structured_outputs")
        self._end_token_ids(params)
        return self._admission.admit(wanted)

    def known(self, params: SamplingParams) -> Admitted | None:
        """As :meth:`admit`, but None if the constraint must be compiled first."""
        wanted = params.structured_outputs
        if wanted is None:
            return None
        self._need_tokenizer("structured_outputs")
        self._end_token_ids(params)
        return self._admission.known(wanted)

    def _constraint(
        self,
        prompt: Prompt,
        ids: Sequence[int],
        params: SamplingParams,
        admitted: Admitted | None,
    ) -> Constraint | None:
        admitted = admitted or self.admit(params)
        if admitted is None:
            return None
        begins_answer = isinstance(prompt, ChatPrompt) and not prompt.continue_final_message
        tail = self._need_tokenizer("structured_outputs").decode(ids[-PROMPT_TAIL:])
        parser = None if self._constrains_reasoning else self._reasoning_parser
        start = start_of(parser, tail, begins_answer=begins_answer)
        ends = self._end_token_ids(params)
        return Constraint(admitted.grammar, ends, *start, size_bytes=admitted.size_bytes)

    def _end_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Tokens that end an output with a constraint: not those that are text."""
        if params.ignore_eos:
            raise RequestError(
                "ignore_eos = True: must be False with structured_outputs, whose end is an end "
                "token",
                param="ignore_eos",
            )
        special = self._need_tokenizer("structured_outputs").special_token_ids
        own = special.intersection(params.stop_token_ids or ())
        ends = own | frozenset(self.model.eos_token_ids)
        if not ends:
            raise UnsupportedFeature(
                "structured_outputs: not with this model, which names no end token; a request may "
                "name a special token in stop_token_ids",
                param="structured_outputs",
            )
        return tuple(sorted(ends))

    def vocabulary(self) -> Vocabulary:
        """The tokens' bytes; made at the first call.

        Raises:
            RequestError: there is no tokenizer, or its tokens are no byte strings.
        """
        if self._vocabulary is None:
            tokenizer, model = self._need_tokenizer("structured_outputs"), self.model
            self._vocabulary = vocabulary_of(tokenizer, model.vocab_size, model.eos_token_ids)
        return self._vocabulary

    def tokenize(
        self, prompt: Prompt, add_special_tokens: bool | None = None, strings: bool = False
    ) -> TokenizedPrompt:
        """Tokens of any prompt, chats included; lengths are not checked.

        Raises:
            RequestError: the prompt is malformed.
        """
        if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None:
            raise UnsupportedFeature(
                "prompt_embeds: embeddings have no tokens that could be shown",
                param="prompt_embeds",
            )
        ids = self._tokens(prompt, add_special_tokens).ids
        if not strings:
            return TokenizedPrompt(ids)
        tokenizer = self._need_tokenizer("prompt")
        return TokenizedPrompt(ids, [tokenizer.token_string(token_id) for token_id in ids])

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids, special tokens included unless they are skipped.

        Raises:
            RequestError: an id is no token.
        """
        self._check_ids("tokens", token_ids)
        tokenizer = self._need_tokenizer("tokens")
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _tokens(self, prompt: Prompt, add_special_tokens: bool | None) -> _Tokens:
        if isinstance(prompt, ChatPrompt):
            text = self._chat_renderer().render(prompt)
            special = (
                prompt.add_special_tokens if add_special_tokens is None else add_special_tokens
            )
            return _Tokens(self._encode(text, special), text, _salt(prompt.cache_salt))
        if isinstance(prompt, Mapping):
            return self._mapping_tokens(prompt, add_special_tokens)
        if isinstance(prompt, str):
            return _Tokens(self._encode(prompt, add_special_tokens is not False), prompt, None)
        return _Tokens(self._checked_ids("prompt", prompt), None, None)

    def _mapping_tokens(
        self, prompt: Mapping[str, object], add_special_tokens: bool | None
    ) -> _Tokens:
        if prompt.get("prompt_embeds") is not None:
            return self._embeds_tokens(prompt)
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt", "prompt_embeds"}
        if unknown:
            raise UnsupportedFeature(
                f"prompt: {sorted(unknown)} cannot be served; a prompt has 'prompt' or "
                "'prompt_token_ids', and 'cache_salt'",
                param=min(unknown),
            )
        salt, text = _salt(prompt.get("cache_salt")), prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"prompt = {text!r}: must be text", param="prompt")
        if prompt.get("prompt_token_ids") is not None:
            ids = self._checked_ids("prompt_token_ids", prompt["prompt_token_ids"])
            return _Tokens(ids, text, salt)
        if text is None:
            raise RequestError(
                "prompt: a mapping needs 'prompt' or 'prompt_token_ids'", param="prompt"
            )
        return _Tokens(self._encode(text, add_special_tokens is not False), text, salt)

    def _embeds_tokens(self, prompt: Mapping[str, object]) -> _Tokens:
        if self._embeds is None:
            raise UnsupportedFeature(
                "prompt_embeds: the engine takes no embeddings; it must be started with "
                "--enable-prompt-embeds (enable_prompt_embeds=True)",
                param="prompt_embeds",
            )
        others = set(prompt) - {"prompt_embeds", "cache_salt"}
        if others:
            raise RequestError(
                f"prompt: {sorted(others)} beside 'prompt_embeds'; a prompt of embeddings may have "
                "'cache_salt' only",
                param=min(others),
            )
        embeds = self._embeds.decode(prompt["prompt_embeds"])
        return _Tokens([0] * embeds.num_tokens, None, _salt(prompt.get("cache_salt")), embeds)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        tokenizer = self._need_tokenizer("prompt")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt: character {error.start} is half of a surrogate pair, which is no text",
                param="prompt",
            ) from None
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{param}: must be token ids, because the engine runs without a tokenizer "
                "(skip_tokenizer_init)",
                param=param,
            )
        return self.tokenizer

    def _chat_renderer(self) -> ChatRenderer:
        self._need_tokenizer("messages")
        if self._renderer is None:
            raise ConfigError("no chat renderer without a tokenizer")
        return self._renderer

    def _checked_ids(self, param: str, ids: object) -> list[int]:
        if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes)):
            raise RequestError(
                f"{param} = {ids!r:.100}: must be text or a list of token ids", param=param
            )
        self._check_ids(param, ids)
        return list(ids)

    def _check_ids(self, param: str, ids: Iterable[object]) -> None:
        size = self.model.vocab_size
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < size:
                raise RequestError(
                    f"{param}: {token_id!r:.100} is no token id; they are integers in "
                    f"0..{size - 1}",
                    param=param,
                )

    def _truncate(self, ids: list[int], params: SamplingParams) -> list[int]:
        """Keep the prompt's end; -1: as much as leaves room for the output."""
        keep, limit = params.truncate_prompt_tokens, self.model.max_model_len
        if keep is None:
            return ids
        if keep > limit:
            raise RequestError(
                f"truncate_prompt_tokens = {keep}: must be at most max_model_len = {limit}, or -1",
                param="truncate_prompt_tokens",
                value=keep,
            )
        if keep == -1:
            keep = max(1, limit - _least_output(params, clamp=False))
        return ids[-keep:]

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise RequestError("prompt: must hold at least one token", param="prompt")

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams, clamp: bool) -> int:
        limit = self.model.max_model_len
        room = limit - num_prompt_tokens
        wanted = params.max_tokens
        least = _least_output(params, clamp)
        if room < least:
            output = f"{least} output tokens" if least > 1 else "one output token"
            raise PromptTooLong(
                f"the prompt's {num_prompt_tokens} tokens and {output} do not fit into the context "
                f"of {limit} tokens",
                param="prompt" if room < 1 or wanted is None else "max_tokens",
                value=num_prompt_tokens,
            )
        cap = self.model.default_sampling_params.get("max_tokens")
        return min(n for n in (room, wanted, cap) if n is not None)

    def _check_priority(self, priority: int) -> None:
        if priority and not self.model.priority_scheduling:
            raise RequestError(
                f"priority = {priority}: must be 0 unless the engine runs with "
                "--scheduling-policy priority",
                param="priority",
                value=priority,
            )

    def _check_params(self, params: SamplingParams) -> None:
        if self._check_device is not None:
            self._check_device(params)
        self._check_count("logprobs", params.logprobs)
        self._check_count("prompt_logprobs", params.prompt_logprobs)
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias or ())
        if params.stop_strings:
            self._need_tokenizer("stop")
        for processor in self._processors:
            _ask(processor, params)

    def _check_count(self, name: str, count: int | None) -> None:
        if count is None:
            return
        size, most = self.model.vocab_size, self.model.max_logprobs
        wanted = size if count == -1 else count
        limit, source = (size, "the vocabulary's size") if most == -1 else (most, "max_logprobs")
        if wanted > limit:
            whole = f" (the whole vocabulary, {size})" if count == -1 else ""
            raise RequestError(
                f"{name} = {count}{whole}: must be at most {source} = {limit}",
                param=name,
                value=count,
            )

    def _thinking(
        self, params: SamplingParams, ids: list[int], embeds: PromptEmbeds | None
    ) -> ThinkingBudget | None:
        """The bound of a request's reasoning, unless its prompt has ended that already."""
        budget = params.thinking_token_budget
        if budget is None:
            return None
        parser = self._reasoning_parser
        if parser is None or not parser.end_marker:
            raise UnsupportedFeature(
                f"thinking_token_budget = {budget}: must be absent unless the engine knows how the "
                "model's reasoning ends (--reasoning-parser, of a format with an end marker)",
                param="thinking_token_budget",
            )
        start, end = parser.start_marker, parser.end_marker
        tokenizer = self._need_tokenizer("thinking_token_budget")
        tail = "" if embeds is not None else tokenizer.decode(ids[-_PROMPT_END:]).rstrip()
        if tail.endswith(end):
            return None  # the template was told not to think
        is_open = bool(start) and tail.endswith(start)
        return ThinkingBudget(
            budget,
            tokenizer.encode(end, add_special_tokens=False),
            [] if is_open or not start else tokenizer.encode(start, add_special_tokens=False),
        )

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each word as it is spelled at the beginning of a text and after a space."""
        found: list[list[int]] = []
        for word in params.bad_words or ():
            tokenizer = self._need_tokenizer("bad_words")
            bare = word.lstrip()
            for spelling in (bare, " " + bare) if bare else (word,):
                ids = tokenizer.encode(spelling, add_special_tokens=False)
                if ids and ids not in found:
                    self._check_ids("bad_words", ids)
                    found.append(ids)
        return found


def _ask(processor: type[LogitsProcessor], params: SamplingParams) -> None:
    """Have a processor check a request. Its own words are for the client, a bug's are not."""
    try:
        processor.validate_params(params)
    except RequestError:
        raise
    except ValueError as error:
        raise RequestError(f"{processor.__name__}: {error}", param="extra_args") from error
    except Exception as error:
        name = f"{processor.__module__}:{processor.__qualname__}"
        logger.exception("logits processor %s failed to check a request", name)
        raise GenerateError("a logits processor failed to check the request") from error


def _check_embeds_params(params: SamplingParams) -> None:
    if params.prompt_logprobs is not None:
        raise UnsupportedFeature(
            "prompt_logprobs: must be absent with prompt_embeds, which has no tokens to describe",
            param="prompt_logprobs",
        )


def _least_output(params: SamplingParams, clamp: bool) -> int:
    """Tokens for which there must be room."""
    if clamp or params.max_tokens is None:
        return max(1, params.min_tokens)
    return params.max_tokens


def _completion_params(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one of ``n`` completions."""
    if params.n == 1 and params.structured_outputs is None:
        return params
    own = copy.copy(params)
    own.n = 1
    own.structured_outputs = None  # the core is told of it in its own form
    if params.seed is not None and index:
        own.seed = _derived_seed(params.seed, index)
    if index:
        own.prompt_logprobs = None  # the prompt is the same: the first completion's are enough
    return own


def _derived_seed(seed: int, index: int) -> int:
    """A seed for completion ``index`` that does not meet those of neighbouring seeds."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _salt(salt: object) -> str | None:
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        raise RequestError(
            f"cache_salt = {salt!r:.100}: must be a non-empty string", param="cache_salt"
        )
    return salt
