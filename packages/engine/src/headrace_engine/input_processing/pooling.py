"""Prompts for pooling -> checked core requests; long texts -> windows of them.

Truncation keeps the end of a prompt. Where the prompt is text, the special tokens around it stay
(a model that pools its first token needs that one); of token ids the last ones are left.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from headrace_core.errors import PromptTooLong, RequestError, UnsupportedFeature
from headrace_core.multimodal import MediaInput
from headrace_core.pooling import (
    EMBED_TASKS,
    TOKEN_TASKS,
    PoolingInfo,
    PoolingParams,
)
from headrace_core.reliability import failpoints
from headrace_core.request import CoreRequest, Prompt
from headrace_core.sampling.params import RequestOutputKind, SamplingParams
from headrace_core.served_model import ServedModel
from headrace_engine.input_processing.control_tokens import RenderedPrompt
from headrace_engine.input_processing.media import cuts_media
from headrace_engine.input_processing.prepared import PreparedRequest
from headrace_engine.input_processing.prompts import Fit, PairParts, PromptReader, PromptTokens

logger = logging.getLogger(__name__)

NO_SAMPLING = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False)
"""Sampling parameters of every pooling request: nothing reads them."""

TASK_REMEDIES: Mapping[str, str] = {
    "embed": "--convert embed",
    "token_embed": "--convert embed",
    "classify": "--convert classify",
    "score": "--convert classify with a model of one label, or --convert embed",
    "token_classify": "--convert classify",
    "plugin": "--io-processor-plugin",
}


class PairPrompt(NamedTuple):
    """Two texts that the model reads as one prompt, by its tokenizer's rule for pairs."""

    first: str
    second: str
    cache_salt: str | None = None


class FilledPrompt(NamedTuple):
    """Tokens whose last ones attend to the others, and nothing to them."""

    token_ids: list[int]
    num_attended_tokens: int
    """At least 1."""


PoolingPrompt = Prompt | PairPrompt | PairParts | FilledPrompt | RenderedPrompt


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """A prompt, read and checked."""

    request_id: str
    """The caller's."""
    token_ids: list[int]
    token_type_ids: list[int] | None
    text: str | None
    cache_salt: str | None
    params: PoolingParams
    """Verified; of this request alone."""
    priority: int
    arrival_time: float
    call: str
    """See :attr:`PreparedRequest.call`."""
    num_attended_tokens: int | None = None
    """See :attr:`FilledPrompt.num_attended_tokens`; None: all."""
    media: Sequence[MediaInput] = ()
    whole_spans: Sequence[tuple[int, ...]] = ()
    """See :attr:`headrace_core.multimodal.MediaPlacement.whole_spans`."""
    window: int = 0
    """Tokens of the windows in which it must be computed; 0: whole."""

    @property
    def num_windows(self) -> int:
        """Requests that it becomes."""
        return -(-len(self.token_ids) // self.window) if self.window else 1

    def num_left_out(self, index: int) -> int:
        """First tokens of a window that its embedding is not made of."""
        start = index * self.window
        length = min(self.window, len(self.token_ids) - start)
        return min(max(0, (self.params.num_left_out or 0) - start), length)


class PoolingInputProcessor:
    """Takes in requests of one pooling model. Thread-safe.

    Args:
        model: facts and limits, as they are when a request comes.
        prompts: reads prompts.
        clock: wall-clock seconds.
    """

    def __init__(
        self,
        model: Callable[[], ServedModel],
        prompts: PromptReader,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._clock = clock
        self._serial = itertools.count()  # next() is atomic
        self._lengths: dict[tuple[str, bool | None], int] = {}

    def read(
        self,
        prompt: PoolingPrompt,
        params: PoolingParams,
        request_id: str,
        *,
        task: str,
        priority: int = 0,
        add_special_tokens: bool | None = None,
        call: str = "",
    ) -> PooledPrompt:
        """Take in one prompt.

        Args:
            params: not changed.
            call: the caller's name for what this is a part of; "": ``request_id``.
            add_special_tokens: None: yes for text, as a chat says for chats.

        Raises:
            UnsupportedFeature: the model does not have the task.
            RequestError: naming the field.
            PromptTooLong: the prompt exceeds the context.
        """
        arrival_time = self._clock()
        if failpoints.PLAN is not None:
            failpoints.hit("input.prepare", request_id)
        model = self._model()
        info = check_task(model, task)
        if task == "plugin":
            raise UnsupportedFeature(
                "task plugin: is answered by the IO processor, which has prompts pooled for another; a "
                "prompt by itself must have one of "
                f"{', '.join(name for name in model.tasks if name != 'plugin')}",
                param="task",
            )
        params = _verified(params, task, info, model)
        check_priority(priority, model)
        keep = _tokens_kept(params, model.max_model_len)
        prompt, introduction = _introduced(prompt, params, info)
        fit = Fit(
            keep, _longest(task, info, model), cut=keep is not None, side=params.truncation_side
        )
        tokens = self._tokens(prompt, add_special_tokens, fit)
        ids, types = _kept(tokens, keep, params)
        if not ids:
            raise RequestError("prompt: must hold at least one token", param="prompt")
        if introduction and params.num_left_out is None and _leaves_out(task, info):
            begins = self._num_tokens(introduction, add_special_tokens)
            if keep is not None and params.truncation_side == "left":
                whole = self._tokens(prompt, add_special_tokens, Fit(cut=True)).ids
                begins -= len(whole) - len(ids)
            params.num_left_out = max(0, begins)
        if params.num_left_out:
            params.num_left_out = min(params.num_left_out, len(ids) - 1)
        if types is not None:
            _check_types(types, len(ids), info)
        window = _window(len(ids), task, info, model)
        if window and tokens.media:
            raise PromptTooLong(
                window, len(ids), hint="A prompt with media is not cut into windows: shorten it."
            )
        return PooledPrompt(
            request_id=request_id,
            token_ids=ids,
            token_type_ids=types if info.token_types else None,
            text=tokens.text,
            cache_salt=tokens.cache_salt,
            params=params,
            priority=priority,
            arrival_time=arrival_time,
            call=call or request_id,
            num_attended_tokens=tokens.num_attended_tokens,
            media=tokens.media,
            whole_spans=tokens.whole_spans,
            window=window,
        )

    def request(self, prompt: PooledPrompt) -> PreparedRequest:
        """A prompt that is computed whole, on its way to the core."""
        return self._prepared(
            prompt, prompt.request_id, prompt.token_ids, prompt.token_type_ids, prompt.params
        )

    def windows(self, prompt: PooledPrompt) -> Iterator[PreparedRequest]:
        """A long prompt's windows, each a request; its results are not normalised."""
        for index, start in enumerate(range(0, len(prompt.token_ids), prompt.window)):
            params = prompt.params.clone()
            params.normalize = False
            params.num_left_out = prompt.num_left_out(index)
            part = slice(start, start + prompt.window)
            types = prompt.token_type_ids
            yield self._prepared(
                prompt,
                f"{prompt.request_id}~{index}",
                prompt.token_ids[part],
                types[part] if types is not None else None,
                params,
            )

    def _num_tokens(self, introduction: str, add_special_tokens: bool | None) -> int:
        """Tokens at a prompt's beginning that come of the text before it, with the special ones there."""
        key = (introduction, add_special_tokens)
        if key not in self._lengths:
            ids = self._tokens(introduction, add_special_tokens, Fit()).ids
            ends = bool(ids) and self._prompts.is_special(ids[-1])
            self._lengths[key] = len(ids) - ends
        return self._lengths[key]

    def _tokens(
        self, prompt: PoolingPrompt, add_special_tokens: bool | None, fit: Fit
    ) -> PromptTokens:
        if isinstance(prompt, PairPrompt):
            read = self._prompts.read_pair(prompt.first, prompt.second, fit)
            return read._replace(cache_salt=prompt.cache_salt)
        if isinstance(prompt, RenderedPrompt | PairParts):
            return self._templated(prompt, add_special_tokens, fit)
        if isinstance(prompt, FilledPrompt):
            return _filled(prompt, fit.max_length)
        if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None:
            raise UnsupportedFeature(
                "prompt_embeds: pooling models take no embeddings", param="prompt_embeds"
            )
        self._prompts.check_text_alone(prompt)
        tokens = self._prompts.read(prompt, add_special_tokens, fit)
        self._prompts.check_tokens_alone(prompt, tokens)
        return tokens

    def _templated(
        self, prompt: RenderedPrompt | PairParts, add_special_tokens: bool | None, fit: Fit
    ) -> PromptTokens:
        """A pair's tokens, with the one that the model wants behind them."""
        info = self._model().pooling
        end = None if info is None else info.pair_end_id
        if end is not None and fit.max_length is not None:
            fit = fit._replace(max_length=max(1, fit.max_length - 1))
        if isinstance(prompt, RenderedPrompt):
            tokens = self._prompts.read_rendered(prompt, add_special_tokens, fit)
        else:
            tokens = self._prompts.read_parts(prompt, add_special_tokens, fit)
        return tokens if end is None else tokens._replace(ids=[*tokens.ids, end])

    def _prepared(
        self,
        prompt: PooledPrompt,
        request_id: str,
        token_ids: list[int],
        token_type_ids: list[int] | None,
        params: PoolingParams,
    ) -> PreparedRequest:
        core = CoreRequest(
            request_id=f"{request_id}#p{next(self._serial):x}",
            prompt_token_ids=token_ids,
            params=NO_SAMPLING,
            stop_token_ids=frozenset(),
            max_tokens=1,
            arrival_time=prompt.arrival_time,
            priority=prompt.priority,
            cache_salt=prompt.cache_salt,
            pooling=params,
            token_type_ids=token_type_ids,
            num_attended_tokens=prompt.num_attended_tokens,
            media=list(prompt.media),
            whole_spans=list(prompt.whole_spans),
        )
        return PreparedRequest(
            request_id=request_id,
            prompt=prompt.text,
            prompt_token_ids=token_ids,
            params=NO_SAMPLING,
            core_requests=[core],
            arrival_time=prompt.arrival_time,
            pooling=params,
            call=prompt.call,
        )


def _kept(
    tokens: PromptTokens, keep: int | None, params: PoolingParams
) -> tuple[list[int], list[int] | None]:
    """(token ids, token types) that a prompt keeps of its own.

    Raises:
        RequestError: media would lose tokens.
    """
    ids, types = tokens.ids, tokens.token_type_ids
    if keep is None or len(ids) <= keep:
        return ids, types
    if tokens.media:
        raise cuts_media(params.truncate_prompt_tokens)
    kept = slice(keep) if params.truncation_side == "right" else slice(-keep, None)
    return ids[kept], types[kept] if types is not None else None


def _leaves_out(task: str, info: PoolingInfo) -> bool:
    """True if embeddings are made of a text's own tokens only."""
    return task == "embed" and not info.include_prompt and info.pooling_type in ("CLS", "MEAN")


def check_task(model: ServedModel, task: str, *, call: str = "") -> PoolingInfo:
    """Facts about the model's pooling.

    Args:
        call: what was called, for messages; "": the task's name.

    Raises:
        UnsupportedFeature: it generates, or does not have the task; says what would help.
    """
    call = call or task
    info = check_pools(model, call=call)
    if task not in model.tasks:
        reasons = "".join(f"; {reason}" for reason in model.unmet.get(task, ()))
        remedy = TASK_REMEDIES.get(task)
        advice = f"; {remedy} may give a model the task" if remedy else ""
        raise UnsupportedFeature(
            f"{call}: {model.architecture} does not have the task {task!r}; its tasks are "
            f"{', '.join(model.tasks) or 'none'}{reasons}{advice}",
            param="task",
        )
    return info


def check_pools(model: ServedModel, *, call: str) -> PoolingInfo:
    """Facts about the model's pooling.

    Raises:
        UnsupportedFeature: it generates; says which runner is in force, and the flag.
    """
    if model.runner != "pooling" or model.pooling is None:
        raise UnsupportedFeature(
            f"{call}: {model.architecture} runs as a generator (runner {model.runner}); start it "
            "with --runner pooling (runner='pooling') for embeddings and scores",
            param="task",
        )
    return model.pooling


def check_generates(model: ServedModel, call: str = "generate") -> None:
    """Refuse to generate with a model that pools.

    Raises:
        UnsupportedFeature: says which runner is in force, and the flag.
    """
    if model.runner != "generate":
        raise UnsupportedFeature(
            f"{call}: {model.architecture} runs as a pooling model (runner {model.runner}; its tasks "
            f"are {', '.join(model.tasks)}); start it with --runner generate (runner='generate') if "
            "it can write text",
        )


def check_priority(priority: int, model: ServedModel) -> None:
    """Raises: RequestError: requests have no priorities here."""
    if priority and not model.priority_scheduling:
        raise RequestError(
            f"priority = {priority}: must be 0 unless the engine runs with "
            "--scheduling-policy priority",
            param="priority",
            value=priority,
        )


def _verified(
    params: PoolingParams, task: str, info: PoolingInfo, model: ServedModel
) -> PoolingParams:
    params = params.clone()
    params.verify(task, info, model.name)
    model.check_extra_kwargs(params)
    if not info.reuses_prefixes or task in TOKEN_TASKS:  # whatever was asked: it would be wrong
        params.skip_reading_prefix_cache = True
    return params


def _introduced(
    prompt: PoolingPrompt, params: PoolingParams, info: PoolingInfo
) -> tuple[PoolingPrompt, str]:
    """A prompt with the text that its request names before it, or the model's default one; and that
    text, "" if there is none.

    Texts only: who sends token ids or a conversation has written all of it, as late interaction has.

    Raises:
        RequestError: it is named for something else.
    """
    if params.task not in EMBED_TASKS:
        return prompt, ""
    text = info.prompt_text(params.prompt_name)
    if isinstance(prompt, str):
        return text + prompt, text
    if isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is None:
        own = prompt.get("prompt")
        if isinstance(own, str):
            return cast("Prompt", {**prompt, "prompt": text + own}), text
    if params.prompt_name is not None:
        raise RequestError(
            f"prompt_name = {params.prompt_name!r}: must be left out unless the input is text; write "
            "the prompt into token ids and conversations",
            param="prompt_name",
            value=params.prompt_name,
        )
    return prompt, ""


def _tokens_kept(params: PoolingParams, limit: int) -> int | None:
    """Most tokens of the prompt; None: all.

    Raises:
        RequestError: more is to be kept than the context holds.
    """
    keep = params.truncate_prompt_tokens
    if keep is not None and keep > limit:
        raise RequestError(
            f"truncate_prompt_tokens = {keep}: must be at most max_model_len = {limit}, or -1",
            param="truncate_prompt_tokens",
            value=keep,
        )
    return limit if keep == -1 else keep


def _filled(prompt: FilledPrompt, keep: int | None) -> PromptTokens:
    """Fillers go before anything else does; if all are gone, everything is attended to."""
    ids, attended = prompt
    if keep is not None:
        ids = ids[: max(keep, attended)]
    return PromptTokens(
        ids, None, None, num_attended_tokens=attended if attended < len(ids) else None
    )


def _check_types(types: Sequence[int], num_tokens: int, info: PoolingInfo) -> None:
    if len(types) != num_tokens:
        raise RequestError(
            f"token_type_ids: {len(types)} for {num_tokens} tokens", param="token_type_ids"
        )
    if info.token_types and not all(0 <= t < info.max_token_types for t in types):
        raise RequestError(
            f"token_type_ids: must be in 0..{info.max_token_types - 1}", param="token_type_ids"
        )


def _longest(task: str, info: PoolingInfo, model: ServedModel) -> int:
    """Tokens that a prompt may have; in windows more than the context."""
    limit = model.max_model_len
    if info.enable_chunked_processing and task == "embed":
        return info.max_embed_len or limit
    return limit


def _window(num_tokens: int, task: str, info: PoolingInfo, model: ServedModel) -> int:
    """Tokens of a long text's windows; 0: the prompt is computed whole.

    Raises:
        PromptTooLong: it is longer than the model takes.
    """
    limit = model.max_model_len
    native = min(limit, info.native_len or limit)
    if info.enable_chunked_processing and task == "embed":
        longest = _longest(task, info, model)
        if num_tokens > longest:
            raise PromptTooLong(
                longest,
                num_tokens,
                hint=f"The maximum embedding input length is {longest} "
                "(pooler_config.max_embed_len): shorten the prompt.",
            )
        if num_tokens > native:
            windows = -(-num_tokens // native)
            logger.info("a text of %d tokens exceeds the model's %d", num_tokens, native)
            logger.info("it is embedded in %d windows of at most %d tokens", windows, native)
            return native
    elif num_tokens > limit:
        raise PromptTooLong(
            limit, num_tokens, hint="Shorten the prompt, or let truncate_prompt_tokens cut it."
        )
    return 0
