"""Outputs of requests."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar, overload

from headrace_core.lora import LoRARequest

logger = logging.getLogger(__name__)

FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(slots=True)
class Logprob:
    """One token's log-probability at one position."""

    logprob: float
    rank: int | None = None
    """1 = likeliest of the vocabulary."""
    decoded_token: str | None = None
    """The token by itself, for showing: a part of a character is U+FFFD."""
    token_bytes: bytes | None = None
    """UTF-8 bytes that the token adds to the text, possibly a part of a character; b"" for one that
    the text leaves out (skipped special tokens, what a stop string cuts off). Of a token that was not
    chosen: what it would have added there. Of a prompt's token: its own. None: not known.

    Those of an output's chosen tokens, joined, decode to its text (``errors="replace"``)."""


PositionLogprobs = dict[int, Logprob]
"""Token id -> entry; the chosen (or prompt) token first, then by rank."""


@dataclass
class FlatLogprobs(MutableSequence["PositionLogprobs | None"]):
    """Log-probabilities of many positions in seven flat lists.

    The number of Python objects does not grow with the length or with how many are asked for.
    Reads like a list of :data:`PositionLogprobs` (None for a position without any); appending is
    possible, changing and deleting are not.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)
    token_bytes: list[bytes | None] = field(default_factory=list)

    def append(self, value: PositionLogprobs | None) -> None:
        entries = value or {}
        self.append_fast(
            list(entries),
            [e.logprob for e in entries.values()],
            [e.rank for e in entries.values()],
            [e.decoded_token for e in entries.values()],
            [e.token_bytes for e in entries.values()],
        )

    def append_fast(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        ranks: Sequence[int | None],
        decoded_tokens: Sequence[str | None],
        token_bytes: Sequence[bytes | None] | None = None,
    ) -> None:
        """Append one position without building its mapping.

        Args:
            token_bytes: None: not known.
        """
        self.start_indices.append(len(self.token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.decoded_tokens.extend(decoded_tokens)
        self.token_bytes.extend([None] * len(token_ids) if token_bytes is None else token_bytes)
        self.end_indices.append(len(self.token_ids))

    def extend(self, values: Iterable[PositionLogprobs | None]) -> None:
        for value in values:
            self.append(value)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> PositionLogprobs | FlatLogprobs | None:
        if isinstance(index, slice):
            part = FlatLogprobs()
            for position in range(*index.indices(len(self))):
                part.append(self[position])
            return part
        start, end = self.start_indices[index], self.end_indices[index]
        if start == end:
            return None
        return {
            self.token_ids[i]: Logprob(
                self.logprobs[i], self.ranks[i], self.decoded_tokens[i], self.token_bytes[i]
            )
            for i in range(start, end)
        }

    def __iter__(self) -> Iterator[PositionLogprobs | None]:
        for index in range(len(self)):
            yield self[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (list, FlatLogprobs)):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other))
        return NotImplemented

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("FlatLogprobs can be appended to, not changed")

    def __delitem__(self, index: Any) -> None:
        raise TypeError("FlatLogprobs can be appended to, not shortened")

    def insert(self, index: int, value: PositionLogprobs | None) -> None:
        raise TypeError("FlatLogprobs can be appended to, not inserted into")


Logprobs = list["PositionLogprobs | None"] | FlatLogprobs


class StepTimes(NamedTuple):
    """Seconds that steps took: one step, or all that a request was part of.

    A step counts whole for each of its requests, as no part of a pass is one request's; and once
    for all completions of a request.
    """

    scheduler: float
    """Deciding what to compute, and taking in what came of it."""
    forward: float | None = None
    """The model's passes; None: not collected."""
    execute: float | None = None
    """The worker's whole steps: inputs, pass, sampling; None: not collected."""

    def plus(self, step: StepTimes) -> StepTimes:
        """With another step, of which the same is collected."""
        return StepTimes(
            self.scheduler + step.scheduler,
            None if step.forward is None else (self.forward or 0.0) + step.forward,
            None if step.execute is None else (self.execute or 0.0) + step.execute,
        )


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, in seconds: ``arrival_time`` on the wall clock, the rest monotonic."""

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    """First scheduled."""
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    step_times: StepTimes | None = None
    """Times of the steps so far, with ``collect_detailed_traces``."""
    num_draft_tokens: int = 0
    """Guessed tokens that were checked; then those that were right."""
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    """None while it runs; else one of :data:`FINISH_REASONS`."""
    stop_reason: int | str | None = None
    """The stop string or token id that ended it; None for EOS and for other reasons, except for
    ``error``: text that says why the request's own parameters left no next token."""
    error: str | None = None
    """Why it failed, or was left no next token, in words; set where ``finish_reason`` is ``error``."""
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """State of a request at one moment, as far as its output kind asks."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Logprobs | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    lora_request: LoRARequest | None = None
    """The adapter that it is computed with."""
    weights_versions: tuple[str, ...] = ()
    """Versions of the weights that computed it so far, each once, oldest first. Several: weights changed
    while it ran, so that no single version gives this answer; () before the first token."""
    kv_transfer_params: dict[str, Any] | None = None
    """Where another engine finds its blocks, once it has ended, if it asked for that."""

    @property
    def weights_version(self) -> str | None:
        """Version of the weights that it began with."""
        return self.weights_versions[0] if self.weights_versions else None

    def add(self, later: RequestOutput, aggregate: bool) -> None:
        """Merge a later output of the same request.

        Args:
            aggregate: True for deltas: texts, ids and log-probabilities are appended; False
                replaces each completion by its later state.
        """
        self.finished = later.finished
        self.metrics = later.metrics or self.metrics
        self.prompt_logprobs = later.prompt_logprobs or self.prompt_logprobs
        self.weights_versions = later.weights_versions or self.weights_versions
        self.kv_transfer_params = later.kv_transfer_params or self.kv_transfer_params
        known = {output.index: position for position, output in enumerate(self.outputs)}
        for output in later.outputs:
            if output.index not in known:
                self.outputs.append(output)
            elif aggregate:
                _append_delta(self.outputs[known[output.index]], output)
            else:
                self.outputs[known[output.index]] = output


def _append_delta(into: CompletionOutput, delta: CompletionOutput) -> None:
    into.text += delta.text
    into.token_ids = [*into.token_ids, *delta.token_ids]
    if delta.logprobs is not None:
        if into.logprobs is None:
            into.logprobs = delta.logprobs
        else:
            into.logprobs.extend(delta.logprobs)
    into.cumulative_logprob = delta.cumulative_logprob
    into.finish_reason = delta.finish_reason
    into.stop_reason = delta.stop_reason
    into.error = delta.error


@dataclass(slots=True)
class BeamSequence:
    """One continuation that a beam search found."""

    tokens: list[int]
    """The prompt's tokens, then the generated ones, the end token included."""
    logprobs: list[PositionLogprobs]
    """One entry for each generated token: that token first, then the other candidates."""
    cum_logprob: float
    """Sum over the generated tokens."""
    score: float
    """``cum_logprob`` divided by the number of generated tokens to the power of ``length_penalty``."""
    num_prompt_tokens: int
    text: str | None = None
    """Text of prompt and output, special tokens included, without an end token unless
    ``include_stop_str_in_output``; None without a tokenizer."""
    output_text: str | None = None
    """Text of the output alone, without special tokens, except for that end token."""
    finish_reason: str | None = None
    """``stop`` after an end token, else ``length``."""
    stop_reason: int | str | None = None
    """The end token."""
    lora_request: LoRARequest | None = None

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.num_prompt_tokens :]


@dataclass(slots=True)
class BeamSearchOutput:
    """The result of a beam search for one prompt."""

    sequences: list[BeamSequence]
    """``beam_width`` of them, best first."""
    prompt_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache held when the search began."""
    weights_versions: tuple[str, ...] = ()
    """As :attr:`RequestOutput.weights_versions`, of all requests of the search."""


OutputT = TypeVar("OutputT")


@dataclass(slots=True)
class PoolingOutput:
    """Pooled result of one prompt."""

    data: Any
    """An engine client gives a :class:`~headrace_core.arrays.PackedArray` of float32, the offline API
    a torch tensor: [size] for a task on the prompt, [tokens, size] for one on its tokens."""


@dataclass(slots=True)
class ScoringOutput:
    """Score of a pair of texts."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[OutputT]):
    """The result of one pooling request."""

    request_id: str
    outputs: OutputT
    prompt_token_ids: list[int]
    """As the model saw them: cut, media placeholders expanded; of a pair, both texts."""
    num_cached_tokens: int = 0
    finished: bool = True
    metrics: RequestMetrics | None = None
    weights_versions: tuple[str, ...] = ()
    """As :attr:`RequestOutput.weights_versions`."""


def all_versions(parts: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """``weights_versions`` of what was made of several requests, from those of each."""
    return tuple(dict.fromkeys(version for part in parts for version in part))


ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
