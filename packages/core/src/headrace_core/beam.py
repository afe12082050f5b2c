"""Beam search: the likeliest continuations found by keeping the best few at every step.

The search is :class:`BeamSearch`, which knows no engine: it says which token sequences to extend,
is told the likeliest next tokens of each, and so on until it is done. :func:`beam_search` drives one
with any :class:`~headrace_core.engine.EngineClient`, all beams of a step at once; each is a request
for one token, whose prompt the prefix cache holds but for its last block.

What it finds, and the scores, are those of Hugging Face's ``generate(num_beams=...,
do_sample=False)``: of the candidates of a step the ``beam_width`` best decide which ended ones are
completed; the best that did not end go on. A score is the sum of log-probabilities divided by the
number of generated tokens, the end token included, to the power of ``length_penalty``. Width 1 is
greedy decoding.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace_core.engine import EngineClient, ServedModel
from headrace_core.errors import GenerateError, PromptTooLong, RequestError, UnsupportedFeature
from headrace_core.output import Logprob, PositionLogprobs, RequestOutput
from headrace_core.request import ChatPrompt, Prompt, TokensPrompt, brings_media
from headrace_core.sampling import BeamSearchParams, RequestOutputKind, SamplingParams


@dataclass(slots=True)
class BeamSequence:
    """One continuation that a search found."""

    tokens: list[int]
    """The prompt's, then those generated, the end token included."""
    logprobs: list[PositionLogprobs]
    """Of each generated token: it first, then the candidates beside it."""
    cum_logprob: float
    """Sum over the generated tokens."""
    score: float
    """By which sequences are ranked; see the module's docstring."""
    num_prompt_tokens: int
    text: str | None = None
    """Of prompt and output, special tokens included, without an end token unless
    ``include_stop_str_in_output``; None without a tokenizer."""
    output_text: str | None = None
    """Of the output alone, without special tokens, except for that end token."""
    finish_reason: str | None = None
    """``stop`` after an end token, else ``length``."""
    stop_reason: int | str | None = None
    """The end token."""
    lora_request: None = None
    """Adapters are not served by this version."""

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.num_prompt_tokens :]


@dataclass(slots=True)
class BeamSearchOutput:
    """What a search found for one prompt."""

    sequences: list[BeamSequence]
    """``beam_width`` of them, best first."""
    prompt_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache held when the search began."""


@dataclass(frozen=True, slots=True)
class _Beam:
    """A sequence under way."""

    tokens: tuple[int, ...]
    """Generated ones."""
    logprobs: tuple[PositionLogprobs, ...]
    cum_logprob: float


class _Candidate(NamedTuple):
    """A sequence and what may follow it; made for every one of them, so it is cheap."""

    cum_logprob: float
    beam: _Beam
    token: int
    position: PositionLogprobs


@dataclass(frozen=True, slots=True)
class _Completed:
    score: float
    beam: _Beam
    ended: bool
    """By an end token."""


class BeamSearch:
    """The search for one prompt.

    Args:
        prompt: its token ids.
        params: width, length and how sequences are scored.
        eos_token_ids: end tokens; none with ``ignore_eos``.
    """

    def __init__(
        self, prompt: Sequence[int], params: BeamSearchParams, eos_token_ids: Collection[int] = ()
    ) -> None:
        self.prompt = list(prompt)
        self.params = params
        self.num_cached_tokens = 0
        """For whoever drives the search to set."""
        self._ends = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._live = [_Beam((), (), 0.0)]
        self._completed: list[_Completed] = []
        self._length = 0
        self._done = False

    @property
    def done(self) -> bool:
        """Whether :meth:`output` is final."""
        return self._done

    @property
    def num_candidates(self) -> int:
        """Likeliest next tokens that are needed of each sequence."""
        return num_candidates(self.params, self._ends)

    def sequences(self) -> list[list[int]]:
        """What is to be extended by one token each, prompt included."""
        return [[*self.prompt, *beam.tokens] for beam in self._live]

    def advance(self, found: Sequence[PositionLogprobs]) -> None:
        """Go on by one token.

        Args:
            found: by sequence of :meth:`sequences`, at least the :attr:`num_candidates` likeliest
                next tokens with their log-probabilities.
        """
        width = self.params.beam_width
        self._length += 1
        candidates = [
            _extended(*candidate)
            for candidate in heapq.nlargest(self.num_candidates, self._candidates(found), key=_sum)
        ]
        at_end = self._length >= self.params.max_tokens
        for beam in candidates[:width]:
            ended = beam.tokens[-1] in self._ends
            if ended or at_end:
                self._completed.append(_Completed(self._score(beam.cum_logprob), beam, ended))
        # Stable: of equal scores the earlier stays.
        self._completed = heapq.nlargest(width, self._completed, key=lambda one: one.score)
        self._live = [b for b in candidates if b.tokens[-1] not in self._ends][:width]
        self._done = at_end or not self._live or not self._can_improve()

    def output(self) -> BeamSearchOutput:
        """The completed sequences, best first, without texts."""
        return BeamSearchOutput(
            [self._sequence(one) for one in self._completed],
            list(self.prompt),
            self.num_cached_tokens,
        )

    def _candidates(self, found: Sequence[PositionLogprobs]) -> Iterator[_Candidate]:
        for beam, position in zip(self._live, found, strict=True):
            for token, entry in position.items():
                yield _Candidate(beam.cum_logprob + entry.logprob, beam, token, position)

    def _can_improve(self) -> bool:
        """Whether a live sequence may still become better than the worst completed one."""
        params = self.params
        if len(self._completed) < params.beam_width:
            return True
        if params.early_stopping is True or params.beam_width == 1:
            return False
        # What the best could reach: its sum only falls, so a long output is the best that it can
        # become under a positive penalty. Measured at today's length that is but a guess, which
        # searches less; it is what Hugging Face's default does.
        length = self._length
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = params.max_tokens
        best = self._live[0].cum_logprob / length**params.length_penalty
        return bool(best > self._completed[-1].score)

    def _score(self, cum_logprob: float) -> float:
        return float(cum_logprob / self._length**self.params.length_penalty)

    def _sequence(self, one: _Completed) -> BeamSequence:
        beam = one.beam
        return BeamSequence(
            tokens=[*self.prompt, *beam.tokens],
            logprobs=list(beam.logprobs),
            cum_logprob=beam.cum_logprob,
            score=one.score,
            num_prompt_tokens=len(self.prompt),
            finish_reason="stop" if one.ended else "length",
            stop_reason=beam.tokens[-1] if one.ended else None,
        )


def num_candidates(params: BeamSearchParams, eos_token_ids: Collection[int]) -> int:
    """Next tokens to ask for: if the best of all sequences end, as many must be left to go on."""
    ends = 0 if params.ignore_eos else len(eos_token_ids)
    return params.beam_width * max(2, 1 + ends)


def step_params(params: BeamSearchParams, model: ServedModel) -> SamplingParams:
    """Parameters of the requests that extend a sequence by one token."""
    return SamplingParams(
        max_tokens=1,
        temperature=params.temperature,
        logprobs=min(num_candidates(params, model.eos_token_ids), model.vocab_size),
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def check_beam_search(params: BeamSearchParams, model: ServedModel) -> None:
    """Refuse what the engine cannot search.

    Raises:
        RequestError: naming the field.
    """
    params.validate()
    if model.logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
        raise UnsupportedFeature(
            f"beam search needs log-probabilities; the engine reports {model.logprobs_mode} "
            "(logprobs_mode)",
            param="use_beam_search",
        )
    wanted = min(num_candidates(params, model.eos_token_ids), model.vocab_size)
    if model.max_logprobs != -1 and wanted > model.max_logprobs:
        raise RequestError(
            f"beam_width = {params.beam_width}: needs {wanted} log-probabilities a step, and the "
            f"engine gives max_logprobs = {model.max_logprobs} (--max-logprobs)",
            param="beam_width",
            value=params.beam_width,
        )


def check_length(num_prompt_tokens: int, params: BeamSearchParams, model: ServedModel) -> None:
    """Refuse a prompt that leaves no room.

    Raises:
        PromptTooLong: prompt and ``max_tokens`` exceed the context.
    """
    if num_prompt_tokens + params.max_tokens > model.max_model_len:
        raise PromptTooLong(
            model.max_model_len, num_prompt_tokens, params.max_tokens, param="max_tokens"
        )


def refuse_embeds(prompt: Prompt) -> None:
    """Beams are told apart by their tokens, and each is a prompt of tokens alone.

    Raises:
        UnsupportedFeature: the prompt is embeddings, or brings media.
    """
    if brings_media(prompt):
        raise UnsupportedFeature(
            "multi_modal_data: beam search needs a prompt of text or tokens",
            param="multi_modal_data",
        )
    if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None:
        raise UnsupportedFeature(
            "prompt_embeds: beam search needs a prompt of text or tokens", param="prompt_embeds"
        )


def next_logprobs(output: RequestOutput) -> PositionLogprobs:
    """The candidates that one step's request found.

    Raises:
        GenerateError: it ended without any.
    """
    completion = output.outputs[0]
    position = completion.logprobs[0] if completion.logprobs else None
    if position is None:
        raise GenerateError(
            f"a step of the beam search ended with reason {completion.finish_reason!r}"
        )
    return position


async def beam_search(
    engine: EngineClient,
    prompt: Prompt,
    params: BeamSearchParams,
    request_id: str,
    *,
    priority: int = 0,
    add_special_tokens: bool | None = None,
) -> BeamSearchOutput:
    """Search the likeliest continuations of one prompt.

    Cancelling it aborts whatever runs of it. ``temperature`` has no effect on raw log-probabilities,
    as in Hugging Face's beam search.

    Args:
        engine: any.
        prompt: of text, tokens, or a chat.
        params: width, length, scoring.
        request_id: the caller's name for it; the requests of each step derive theirs from it.
        priority: of these requests.
        add_special_tokens: as for :meth:`~headrace_core.engine.EngineClient.generate`.

    Raises:
        RequestError: a parameter or the prompt is wrong.
        QueueFull, GenerateError, EngineDead: as from ``generate``.
    """
    model = engine.model
    refuse_embeds(prompt)
    check_beam_search(params, model)
    tokens = await engine.tokenize(prompt, add_special_tokens=add_special_tokens)
    check_length(len(tokens.token_ids), params, model)
    search = BeamSearch(tokens.token_ids, params, model.eos_token_ids)
    requests = _Requests(engine, params, request_id, _salt(prompt), priority)
    while not search.done:
        found = await requests.extend(search)
        search.advance([next_logprobs(output) for output in found])
    output = search.output()
    if model.has_tokenizer:
        for sequence in output.sequences:
            await _add_texts(engine, sequence, params)
    return output


class _Requests:
    """Extends sequences by requests for one token each."""

    def __init__(
        self,
        engine: EngineClient,
        params: BeamSearchParams,
        request_id: str,
        cache_salt: str | None,
        priority: int,
    ) -> None:
        self._engine = engine
        self._params = step_params(params, engine.model)
        self._request_id = request_id
        self._salt = cache_salt
        self._priority = priority
        self._count = 0

    async def extend(self, search: BeamSearch) -> list[RequestOutput]:
        """One output per live sequence; if one fails, or this is cancelled, none goes on."""
        prompts = [step_prompt(tokens, self._salt) for tokens in search.sequences()]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run(prompt)) for prompt in prompts]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        outputs = [task.result() for task in tasks]
        if self._count == len(prompts):
            search.num_cached_tokens = outputs[0].num_cached_tokens
        return outputs

    async def _run(self, prompt: TokensPrompt) -> RequestOutput:
        self._count += 1
        last = None
        stream = self._engine.generate(
            prompt, self._params, f"{self._request_id}-beam-{self._count}", priority=self._priority
        )
        async for output in stream:
            last = output
        if last is None:
            raise GenerateError("a step of the beam search gave no output")
        return last


def step_prompt(tokens: list[int], cache_salt: str | None) -> TokensPrompt:
    """The prompt of a request that extends a sequence."""
    prompt = TokensPrompt(prompt_token_ids=tokens)
    if cache_salt is not None:
        prompt["cache_salt"] = cache_salt
    return prompt


def shown_tokens(
    sequence: BeamSequence, params: BeamSearchParams
) -> tuple[list[int], list[int], list[int]]:
    """What texts are made of: (all tokens, those of the prompt, the end token if it is shown)."""
    tokens, prompt = sequence.tokens, sequence.tokens[: sequence.num_prompt_tokens]
    if sequence.finish_reason != "stop":
        return tokens, prompt, []
    return tokens[:-1], prompt, tokens[-1:] if params.include_stop_str_in_output else []


def continued(whole: str, beginning: str, rest: str) -> str:
    """The text that was added to a beginning; ``rest`` if the two do not fit together."""
    return whole[len(beginning) :] if whole.startswith(beginning) else rest


async def _add_texts(
    engine: EngineClient, sequence: BeamSequence, params: BeamSearchParams
) -> None:
    tokens, prompt, end = shown_tokens(sequence, params)
    sequence.text = await engine.detokenize([*tokens, *end])
    whole = await engine.detokenize(tokens, skip_special_tokens=True)
    before = await engine.detokenize(prompt, skip_special_tokens=True)
    rest = await engine.detokenize(tokens[len(prompt) :], skip_special_tokens=True)
    sequence.output_text = continued(whole, before, rest)
    if end:
        sequence.output_text += await engine.detokenize(end)


def _salt(prompt: Prompt) -> str | None:
    if isinstance(prompt, ChatPrompt):
        return prompt.cache_salt
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    return salt if isinstance(salt, str) else None


def _sum(candidate: _Candidate) -> float:
    return candidate.cum_logprob


def _extended(cum_logprob: float, beam: _Beam, token: int, position: PositionLogprobs) -> _Beam:
    entries: dict[int, Logprob] = {token: position[token]}  # the chosen one first
    entries.update(position)
    return _Beam((*beam.tokens, token), (*beam.logprobs, entries), cum_logprob)
