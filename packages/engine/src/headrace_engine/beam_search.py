"""Beam search: the likeliest continuations found by keeping the best few at every step.

The search is :class:`BeamSearch`, which knows no engine: it says which token sequences to extend,
gets the likeliest next tokens of each, and so on until it is done. :class:`BeamSearchTask` drives one
with an engine, all beams of a step at once; each is a request for one token, whose prompt the prefix cache
holds but for its last block.

The sequences and their scores are those of Hugging Face's ``generate(num_beams=...,
do_sample=False)``: of the candidates of a step the ``beam_width`` best decide which ended ones are
completed; the best that did not end go on. A score is the sum of log-probabilities divided by the
number of generated tokens, the end token included, to the power of ``length_penalty``. Width 1 is
greedy decoding.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from headrace_core.engine import TokenizedPrompt
from headrace_core.errors import GenerateError, PromptTooLong, RequestError, UnsupportedFeature
from headrace_core.lora import LoRARequest
from headrace_core.output import (
    BeamSearchOutput,
    BeamSequence,
    Logprob,
    PositionLogprobs,
    RequestOutput,
    all_versions,
)
from headrace_core.request import ChatPrompt, Prompt, TokensPrompt, brings_media
from headrace_core.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams
from headrace_core.served_model import ServedModel

T = TypeVar("T")


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
        """Prompt tokens in the prefix cache at the start; the driver sets it."""
        self._ends = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._live = [_Beam((), (), 0.0)]
        self._completed: list[_Completed] = []
        self._length = 0
        self._done = False

    @property
    def done(self) -> bool:
        """True once :meth:`output` is final."""
        return self._done

    @property
    def num_candidates(self) -> int:
        """Number of likeliest next tokens that the search needs for each sequence."""
        return num_candidates(self.params, self._ends)

    def sequences(self) -> list[list[int]]:
        """Token sequences to extend by one token each, prompt included."""
        return [[*self.prompt, *beam.tokens] for beam in self._live]

    def advance(self, found: Sequence[PositionLogprobs]) -> None:
        """Extend the sequences by one token.

        Args:
            found: for each of :meth:`sequences`, at least the :attr:`num_candidates` likeliest
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
        """True while a live sequence may still become better than the worst completed one."""
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
    """Number of next tokens to ask for: if the best of all sequences end, as many must be left."""
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
    """Refuse a search that the engine cannot run.

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
    """Refuse a prompt that leaves no room for the output.

    Raises:
        PromptTooLong: prompt and ``max_tokens`` exceed the context.
    """
    if num_prompt_tokens + params.max_tokens > model.max_model_len:
        raise PromptTooLong(
            model.max_model_len, num_prompt_tokens, params.max_tokens, param="max_tokens"
        )


def refuse_embeds(prompt: Prompt) -> None:
    """Refuse a prompt with embeddings or media: a beam is a prompt of tokens alone.

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
    """Candidates that one step's request found.

    Raises:
        GenerateError: the request ended without any.
    """
    completion = output.outputs[0]
    position = completion.logprobs[0] if completion.logprobs else None
    if position is None:
        raise GenerateError(
            f"a step of the beam search ended with reason {completion.finish_reason!r}"
        )
    return position


class TokenEngine(Protocol):
    """An engine as far as a search needs one (:class:`headrace_engine.front.EngineFront`)."""

    @property
    def model(self) -> ServedModel: ...

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput: ...

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool | None = None
    ) -> TokenizedPrompt: ...

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str: ...

    async def results(self, work: Iterator[Coroutine[Any, Any, T]], at_once: int) -> list[T]: ...


class BeamSearchTask:
    """A search over an engine: :meth:`prepare`, then :meth:`run`, once.

    Arguments, result and errors are those of :meth:`~headrace_core.engine.EngineClient.beam_search`.
    ``temperature`` has no effect on raw log-probabilities, as in Hugging Face's beam search. The requests
    of the steps are named ``{request_id}-beam-{number}``.

    Args:
        engine: runs the requests.
    """

    def __init__(
        self,
        engine: TokenEngine,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str,
        priority: int = 0,
        add_special_tokens: bool | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        self._engine = engine
        self._lora_request = lora_request
        self._prompt = prompt
        self._params = params
        self._request_id = request_id
        self._priority = priority
        self._add_special_tokens = add_special_tokens
        self._salt = _salt(prompt)
        self._count = 0
        self._search: BeamSearch | None = None

    async def prepare(self) -> None:
        """Tokenize the prompt and check what is asked for.

        Raises: as :meth:`run`, what the caller is to blame for.
        """
        model = self._engine.model
        refuse_embeds(self._prompt)
        check_beam_search(self._params, model)
        tokens = await self._engine.tokenize(
            self._prompt, add_special_tokens=self._add_special_tokens
        )
        if not tokens.token_ids:
            raise RequestError("prompt: must hold at least one token", param="prompt")
        check_length(len(tokens.token_ids), self._params, model)
        self._search = BeamSearch(tokens.token_ids, self._params, model.eos_token_ids)

    async def run(self) -> BeamSearchOutput:
        """The likeliest continuations. If a step fails, or the call is cancelled, its requests end."""
        search, model = self._search, self._engine.model
        assert search is not None
        params = step_params(self._params, model)
        versions: tuple[str, ...] = ()
        while not search.done:
            first = not self._count
            prompts = [step_prompt(tokens, self._salt) for tokens in search.sequences()]
            steps = (self._extend(prompt, params) for prompt in prompts)
            found = await self._engine.results(steps, len(prompts))
            if first:
                search.num_cached_tokens = found[0].num_cached_tokens
            search.advance([next_logprobs(output) for output in found])
            versions = all_versions([versions, *(output.weights_versions for output in found)])
        output = search.output()
        output.weights_versions = versions
        for sequence in output.sequences:
            sequence.lora_request = self._lora_request
        if model.has_tokenizer:
            for sequence in output.sequences:
                await _add_texts(self._engine, sequence, self._params)
        return output

    async def _extend(self, prompt: TokensPrompt, params: SamplingParams) -> RequestOutput:
        self._count += 1
        request_id = f"{self._request_id}-beam-{self._count}"
        return await self._engine.complete(
            prompt,
            params,
            request_id,
            priority=self._priority,
            lora_request=self._lora_request,
        )


def step_prompt(tokens: list[int], cache_salt: str | None) -> TokensPrompt:
    """Prompt of a request that extends a sequence."""
    prompt = TokensPrompt(prompt_token_ids=tokens)
    if cache_salt is not None:
        prompt["cache_salt"] = cache_salt
    return prompt


def shown_tokens(
    sequence: BeamSequence, params: BeamSearchParams
) -> tuple[list[int], list[int], list[int]]:
    """Tokens that the texts are decoded from: (all tokens, the prompt's, the end token if it is shown)."""
    tokens, prompt = sequence.tokens, sequence.tokens[: sequence.num_prompt_tokens]
    if sequence.finish_reason != "stop":
        return tokens, prompt, []
    return tokens[:-1], prompt, tokens[-1:] if params.include_stop_str_in_output else []


def continued(whole: str, beginning: str, rest: str) -> str:
    """Text that follows a beginning; ``rest`` if the whole does not start with it."""
    return whole[len(beginning) :] if whole.startswith(beginning) else rest


async def _add_texts(engine: TokenEngine, sequence: BeamSequence, params: BeamSearchParams) -> None:
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
