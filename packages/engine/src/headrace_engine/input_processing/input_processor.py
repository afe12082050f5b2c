"""Requests on their way in: any prompt and its parameters -> checked core requests.

Everything that the core assumes of a request is checked here, so that nothing that a caller sends
can fail inside a step.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from headrace_core.engine import TokenizedPrompt
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.grammar import Vocabulary
from headrace_core.reliability import failpoints
from headrace_core.request import ChatPrompt, CoreRequest, Prompt, ThinkingBudget
from headrace_core.sampling.logits_processor import LogitsProcessor
from headrace_core.sampling.params import SamplingParams
from headrace_core.served_model import ServedModel
from headrace_core.text import ReasoningParser, Tokenizer
from headrace_engine.config import StructuredOutputsConfig
from headrace_engine.input_processing.alignment import AlignmentInputProcessor
from headrace_engine.input_processing.chat.template import PromptTemplates
from headrace_engine.input_processing.checks import (
    ParamsChecks,
    check_encodes,
    check_with_embeds,
)
from headrace_engine.input_processing.constraints import Constraints
from headrace_engine.input_processing.control_tokens import RenderedPrompt
from headrace_engine.input_processing.late_interaction import MarkedTexts
from headrace_engine.input_processing.lengths import max_tokens, truncate
from headrace_engine.input_processing.media import MediaReader, cuts_media, needed_media
from headrace_engine.input_processing.pooling import (
    PoolingInputProcessor,
    check_generates,
    check_priority,
)
from headrace_engine.input_processing.prepared import PreparedRequest
from headrace_engine.input_processing.prompts import Fit, PromptReader, PromptTokens
from headrace_engine.input_processing.tokens import check_ids, need_tokenizer
from headrace_engine.pooling.scores import ScorePlanner
from headrace_engine.structured.admission import Admitted


class InputProcessor:
    """Turns prompts and parameters into core requests. Thread-safe.

    Args:
        tokenizer: None: prompts must be token ids.
        model: facts and limits.
        chat_template: replaces the tokenizer's own template.
        content_format: what templates expect ``content`` to be, unless a prompt says otherwise.
        prompt_templates: how templates are treated that prompts bring.
        allow_control_tokens: text of special tokens in messages becomes these tokens.
        structured_outputs: backend and limits of constraints on outputs.
        processors: logits processors that the engine runs; they check requests.
        reasoning_parser: knows where the model's reasoning begins and ends; where it ends,
            constraints begin. None: the model does not reason.
        check_params: refuses what the device cannot honour.
        media: reads what prompts bring besides text; None: the model takes none.
        default_loras: modality -> path of the adapter of prompts that bring media of it and name none.
        only_encodes: requests end when their media are encoded, for other engines.
        kv_role: what the engine does with blocks of other engines' caches; "": nothing.
        clock: wall-clock seconds.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        model: ServedModel,
        *,
        chat_template: str | None = None,
        content_format: str = "auto",
        prompt_templates: PromptTemplates = "refused",
        allow_control_tokens: bool = False,
        structured_outputs: StructuredOutputsConfig | None = None,
        processors: Sequence[type[LogitsProcessor]] = (),
        reasoning_parser: type[ReasoningParser] | None = None,
        check_params: Callable[[SamplingParams], None] | None = None,
        media: MediaReader | None = None,
        default_loras: Mapping[str, str] | None = None,
        only_encodes: bool = False,
        kv_role: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.default_loras = default_loras or {}
        self._only_encodes = only_encodes
        self._clock = clock
        self._serial = itertools.count()  # next() is atomic
        self._reasoning_parser = reasoning_parser
        self._prompts = PromptReader(
            tokenizer,
            model,
            chat_template=chat_template,
            content_format=content_format,
            prompt_templates=prompt_templates,
            allow_control_tokens=allow_control_tokens,
            media=media,
        )
        self.pooling = PoolingInputProcessor(lambda: self.model, self._prompts, clock)
        """The same for pooling models."""
        self.alignment = AlignmentInputProcessor(lambda: self.model, self._prompts, clock)
        """The same for sequences to be aligned."""
        self.scores = ScorePlanner(
            lambda: self.model, self._prompts.render_pair, _marked_texts(model, tokenizer)
        )
        """Plans what must be pooled for pairs of texts."""
        self._checks = ParamsChecks(tokenizer, model, processors, check_params, kv_role)
        self._constraints = Constraints(
            tokenizer, model, structured_outputs or StructuredOutputsConfig(), reasoning_parser
        )

    def close(self) -> None:
        """End the processes in which templates render, constraints compile and embeddings are read,
        if there are any; they would be started anew."""
        self._constraints.close()
        self._prompts.close()

    def limit_context(self, max_model_len: int) -> None:
        """Take over the context that the engine could make room for, if it is shorter (0: it is not).

        To be called before the first request.
        """
        if 0 < max_model_len < self.model.max_model_len:
            self.model = dataclasses.replace(self.model, max_model_len=max_model_len)
            self._prompts.limit_context(max_model_len)

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
        """Take in one request for text.

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
            UnsupportedFeature: the model generates no text.
            PromptTooLong: the prompt, or prompt and output, exceed the context.
        """
        arrival_time = self._clock()
        if failpoints.PLAN is not None:
            failpoints.hit("input.prepare", request_id)
        check_generates(self.model)
        params = params.clone()
        params.validate()
        check_priority(priority, self.model)
        self._checks.check(params)
        self._prompts.check_text_alone(prompt)
        fit = Fit(cut=params.truncate_prompt_tokens is not None)
        tokens = self._prompts.read(prompt, add_special_tokens, fit)
        self._prompts.check_tokens_alone(prompt, tokens)
        tokens = self._shortened(tokens, params)
        ids = tokens.ids
        request = PreparedRequest(
            request_id=request_id,
            prompt=tokens.text,
            prompt_token_ids=ids,
            params=params,
            core_requests=[],
            arrival_time=arrival_time,
        )
        serial = next(self._serial)
        stop_token_ids = params.all_stop_token_ids(self.model.eos_token_ids)
        source = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        longest = max_tokens(len(ids), params, self.model, clamp=clamp_max_tokens, source=source)
        if self._only_encodes:
            check_encodes(params, tokens.media)
            longest, params.detokenize, params.stop = 1, False, None
        constraint = self._constraints.of(prompt, tokens, params, admitted)
        bad_words = self._checks.bad_words(params)
        self._checks.check_possible(params, bad_words, stop_token_ids)
        thinking = thinking_budget(params, self._reasoning_parser, self.tokenizer, tokens)
        request.core_requests = [
            CoreRequest(
                # Unique by our own part, whatever a caller used as its id.
                request_id=f"{request_id}#{serial:x}" + (f".{index}" if params.n > 1 else ""),
                prompt_token_ids=ids,
                params=completion_params(params, index),
                stop_token_ids=stop_token_ids,
                max_tokens=longest,
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=tokens.cache_salt,
                bad_words_token_ids=bad_words,
                constraint=constraint,
                prompt_embeds=tokens.embeds,
                thinking=thinking,
                media=list(tokens.media),
                whole_spans=list(tokens.whole_spans),
                num_encoder_tokens=tokens.num_encoder_tokens,
            )
            for index in range(params.n)
        ]
        return request

    def admit(self, params: SamplingParams) -> Admitted | None:
        """See :meth:`headrace_engine.input_processing.constraints.Constraints.admit`."""
        return self._constraints.admit(params)

    def known(self, params: SamplingParams) -> Admitted | None:
        """See :meth:`headrace_engine.input_processing.constraints.Constraints.known`."""
        return self._constraints.known(params)

    def vocabulary(self) -> Vocabulary:
        """See :meth:`headrace_engine.input_processing.constraints.Constraints.vocabulary`."""
        return self._constraints.vocabulary()

    def tokenize(
        self, prompt: Prompt, add_special_tokens: bool | None = None, strings: bool = False
    ) -> TokenizedPrompt:
        """Tokens of any prompt, chats included, however many; text is bounded
        (:mod:`headrace_engine.input_processing.text_limits`).

        Raises:
            RequestError: the prompt is malformed.
            PromptTooLong: its text is beyond what is tokenized.
        """
        if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None:
            raise UnsupportedFeature(
                "prompt_embeds: embeddings have no tokens that could be shown",
                param="prompt_embeds",
            )
        ids = self._prompts.read(prompt, add_special_tokens, Fit(cut=True)).ids
        if not strings:
            return TokenizedPrompt(ids)
        tokenizer = need_tokenizer(self.tokenizer, "prompt")
        return TokenizedPrompt(ids, [tokenizer.token_string(token_id) for token_id in ids])

    def render(self, chat: ChatPrompt) -> str:
        """The prompt's text that the chat template makes of a chat without media.

        Raises:
            RequestError: no template, wrong messages, or the template failed or refused.
            PromptTooLong: the chat is far longer than the context.
        """
        return self.render_guarded(chat).plain

    def render_guarded(
        self, chat: ChatPrompt, generation_marks: tuple[str, str] | None = None
    ) -> RenderedPrompt:
        """The same text, in which control tokens of messages are guarded.

        Args:
            generation_marks: written at the beginning and at the end of each ``{% generation %}`` block
                of the template.

        Raises: as :meth:`render`.
        """
        return self._prompts.render(chat, generation_marks)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids, special tokens included unless they are skipped.

        Raises:
            RequestError: an id is no token.
        """
        check_ids("tokens", token_ids, self.model.vocab_size)
        tokenizer = need_tokenizer(self.tokenizer, "tokens")
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _shortened(self, tokens: PromptTokens, params: SamplingParams) -> PromptTokens:
        """The prompt as far as ``truncate_prompt_tokens`` keeps it; what is cut has no text."""
        ids = truncate(tokens.ids, params, self.model.max_model_len)
        if not ids:
            raise RequestError("prompt: must hold at least one token", param="prompt")
        embeds = tokens.embeds
        if embeds is not None:
            check_with_embeds(params)
            embeds = embeds.last(len(ids))
        whole = len(ids) == len(tokens.ids)
        if self.model.is_encoder_decoder and not tokens.num_encoder_tokens:
            raise needed_media("the model's encoder reads nothing else")
        if self._prompts.needs_media and not tokens.media:
            raise needed_media(self._prompts.needs_media)
        if tokens.media and not whole and not tokens.num_encoder_tokens:
            raise cuts_media(params.truncate_prompt_tokens)
        return tokens._replace(ids=ids, text=tokens.text if whole else None, embeds=embeds)


def _marked_texts(model: ServedModel, tokenizer: Tokenizer | None) -> MarkedTexts | None:
    pooling = model.pooling
    if tokenizer is None or pooling is None or pooling.late_interaction is None:
        return None
    return MarkedTexts(
        pooling.late_interaction,
        tokenizer,
        max_model_len=model.max_model_len,
        lower_case=pooling.lower_case,
        causal=pooling.causal,
    )


def completion_params(params: SamplingParams, index: int) -> SamplingParams:
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


_PROMPT_END = 64
"""Tokens of a prompt in which a template may have begun, or ended, the reasoning."""


def thinking_budget(
    params: SamplingParams,
    parser: type[ReasoningParser] | None,
    tokenizer: Tokenizer | None,
    tokens: PromptTokens,
) -> ThinkingBudget | None:
    """The bound of a request's reasoning, unless its prompt has ended that already.

    Raises:
        UnsupportedFeature: a bound, and nobody knows how the reasoning ends.
    """
    budget = params.thinking_token_budget
    if budget is None:
        return None
    if parser is None or not parser.end_marker:
        raise UnsupportedFeature(
            f"thinking_token_budget = {budget}: must be absent unless the engine knows how the "
            "model's reasoning ends (--reasoning-parser, of a format with an end marker)",
            param="thinking_token_budget",
        )
    start, end = parser.start_marker, parser.end_marker
    wanted = params.structured_outputs
    written = end
    if wanted is not None and wanted.enable_in_reasoning:  # it may not admit the end marker
        written = parser.thought_end or end
    tokenizer = need_tokenizer(tokenizer, "thinking_token_budget")
    tail = "" if tokens.embeds is not None else tokenizer.decode(tokens.ids[-_PROMPT_END:]).rstrip()
    if tail.endswith(end):
        return None  # the template was told not to think
    is_open = bool(start) and tail.endswith(start)
    return ThinkingBudget(
        budget,
        tokenizer.encode(written, add_special_tokens=False),
        [] if is_open or not start else tokenizer.encode(start, add_special_tokens=False),
    )
