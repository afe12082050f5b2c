"""Data between scheduler and worker: a step's schedule and its result, both plain data.

The schedule is ``{request: number of tokens}``. There are no phases: chunked prefill, prefix hits
and resumed requests are all "these tokens next". The worker keeps a request's tokens from the step
that introduces it until the step that says it is gone, and appends what it samples itself, so
that a step can be scheduled before the previous step's tokens are known here.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace_core.arrays import PackedArray
from headrace_core.lora import LoRARequest
from headrace_core.multimodal import MediaInput
from headrace_core.request import CoreRequest


@dataclass(slots=True)
class NewRequest:
    """A request that the worker does not hold: just arrived, or resumed after preemption."""

    request: CoreRequest
    """The request as it came; not to be changed."""
    token_ids: list[int]
    """Prompt, then the tokens that were generated before a preemption."""
    block_ids: tuple[list[int], ...]
    """By cache group; whole table."""
    num_computed_tokens: int = 0
    """Already in the cache; less than ``len(token_ids)``."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens that were generated before a preemption."""
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(slots=True)
class ScheduledStep:
    """One step's work."""

    step_id: int
    num_scheduled_tokens: dict[str, int]
    """By request id, in batch order. Every value is at least 1. Steps may share it: never changed."""
    new_requests: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, tuple[list[int], ...]] = field(default_factory=dict)
    """For requests that the worker holds: blocks to append to their tables, by cache group."""
    gone_request_ids: list[str] = field(default_factory=list)
    """Finished, aborted or preempted since the last step: forget them, before anything else. Ids
    that the worker does not hold are ignored."""
    connector_metadata: dict[str, Any] | None = None
    """Blocks that a :class:`headrace_core.kv.KVConnector` saves and loads around the step."""
    allows_late: bool = False
    """Tokens that this step samples may come with a later one (:attr:`StepResult.late`). A step
    without requests gives late tokens time to become known."""
    placed_adapters: dict[int, LoRARequest] = field(default_factory=dict)
    """By slot: to be put there before the step runs. Nobody in flight has what the slot held."""
    num_drafts: dict[str, int] = field(default_factory=dict)
    """By request: guessed tokens that may be checked besides; the cache has room for them."""
    media_ahead: list[MediaInput] = field(default_factory=list)
    """To be embedded beside this step and later ones; :attr:`StepResult.embedded` says when it is done."""

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class TokenLogprobs(NamedTuple):
    """Log-probabilities (or logits, by mode) of one position."""

    token_ids: list[int]
    """The chosen (or prompt) token first, then the best by rank; the chosen may be there twice
    only if it is asked for once: duplicates are removed by the worker."""
    logprobs: list[float]
    ranks: list[int]
    """1-based, over the vocabulary."""


@dataclass(slots=True)
class RequestStepResult:
    """One request's result of one step."""

    token_ids: list[int] = field(default_factory=list)
    """Sampled tokens; empty while the prompt is not yet complete."""
    num_drafted: int = 0
    """Guesses that were checked; all but the last of ``token_ids`` were right."""
    logprobs: list[TokenLogprobs] | None = None
    """One per sampled token, if the request asked."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """For the prompt tokens *after* each computed position of this step, if asked."""
    pooled: PackedArray | None = None
    """float32; the result of a pooling request, in the step that completes its prompt."""
    error: str | None = None
    """This request failed in this step (others did not); it will be ended with reason error."""
    not_computed: bool = False
    """With an error or a dead end: nothing was written into the blocks of its tokens."""
    dead_end: str | None = None
    """Why the request's own parameters leave it no next token: it will be ended with reason error,
    and this is told to its client. Nothing has failed."""
    is_slow: bool = False
    """It takes long to find out which tokens may be next: as long as a sampled token is not known
    here, no step after it should be scheduled. Without a token, where the step samples one: the
    token is late."""


@dataclass(slots=True)
class StepResult:
    """A worker's result of a step."""

    step_id: int
    requests: dict[str, RequestStepResult]
    """By request id, for every request of the step that is not among :attr:`tokens`."""
    forward_seconds: float = 0.0
    """The model's pass, its logits included; what the CPU did beside it counts too."""
    execute_seconds: float = 0.0
    """The worker's whole step, from its inputs to its tokens, but for what is left to :meth:`finish`
    (and with what it finished of the step before); 0 = nobody asked."""
    late: dict[str, RequestStepResult] = field(default_factory=dict)
    """By request id: tokens that earlier steps sampled and did not return
    (:attr:`RequestStepResult.is_slow`). They come before this step's own."""
    embedded: list[str] = field(default_factory=list)
    """Content hashes of media that nobody needs to wait for any more."""
    tokens: dict[str, int] = field(default_factory=dict)
    """By request id: the one sampled token of requests of which there is nothing else to say."""
    failed_loads: list[bytes] = field(default_factory=list)
    """Keys of blocks that a connector did not have after all."""
    remaining: Callable[[], None] | None = None
    """Fills in what is missing yet; None: nothing is. See :meth:`finish`."""
    arrival: Future[Any] | None = None
    """Done when :attr:`remaining` need wait for nothing; the next step may begin before."""

    def finish(self) -> None:
        """Complete the results. Nothing happens the second time.

        Whoever runs the worker calls this before it passes the result on, in the worker's thread, at
        the latest when the next step is launching: it is work that need not keep that step waiting.
        What it raises fails the step.
        """
        remaining, self.remaining = self.remaining, None
        if remaining is not None:
            remaining()
