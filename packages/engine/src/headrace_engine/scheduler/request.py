"""A request as the scheduler sees it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from headrace_core.multimodal import MediaInput
from headrace_core.request import CoreRequest, PromptEmbeds
from headrace_core.step import TokenLogprobs
from headrace_engine.lora.store import KnownAdapter
from headrace_engine.scheduler.adapter_slots import Place

if TYPE_CHECKING:
    from headrace_engine.scheduler.decode_group import DecodeGroup


class RequestStatus(enum.Enum):
    """The state of a request's life."""

    WAITING = "waiting"
    """Never scheduled."""
    RUNNING = "running"
    """Holds blocks and takes part in steps."""
    PREEMPTED = "preempted"
    """Back in the queue, without blocks; computes everything again when resumed."""
    SUSPENDED = "suspended"
    """Neither in the queue nor in steps, without blocks, until it is resumed."""
    FINISHED = "finished"


class InFlight(NamedTuple):
    """A request's part in a step whose result is not known yet."""

    state: SchedulerRequest
    epoch: int
    """The state's epoch at scheduling: a result from an earlier epoch is dropped."""
    samples: bool
    """True if the step yields a token for it."""
    num_drafts: int = 0
    """Guesses that the step may check besides: it yields at most so many more tokens."""


by_order = attrgetter("sort_key")
"""A request's place in the policy's order."""


class StepInFlight(NamedTuple):
    """A step whose result is not known yet."""

    step_id: int
    entries: list[InFlight]
    """Parts of requests that are in no group."""
    num_in_order: int
    """The first so many entries are in the order in which requests run."""
    is_grouped: bool
    """True if the group has a part in it."""

    def with_left(self, left: list[InFlight]) -> list[InFlight]:
        """All entries, with those of requests that have left the group, in the step's order."""
        if not left:
            return self.entries
        first = [*self.entries[: self.num_in_order], *left]
        first.sort(key=lambda entry: entry.state.sort_key)
        return first + self.entries[self.num_in_order :]


@dataclass(slots=True, eq=False)
class SchedulerRequest:
    """One request's tokens and counters; a :class:`~headrace_engine.kv.contract.CachedSequence`.

    With steps in flight the tokens are, in order::

        |---- prompt ----|---- known output ----|---- placeholders ----|
        |<------------- all_token_ids --------->|  sampled by steps in flight
        |<------ num_computed_tokens ------>|      in the cache when the steps in flight end

    Where steps in flight check guesses, placeholders and ``num_computed_tokens`` count all of them as
    right until the steps end.

    A request can be scheduled for the tokens from ``num_computed_tokens`` to
    :attr:`num_tokens`; a step that reaches the end of them samples one more.

    While it is a member of a :class:`~headrace_engine.scheduler.decode_group.DecodeGroup` its counters and
    tokens are brought up to date when they are read. Fields that begin with ``own`` are not; they serve code
    that knows that it is in none, and sums.
    """

    request: CoreRequest
    request_id: str
    own_token_ids: list[int]
    """:attr:`all_token_ids`, but for what is not settled of a member of a group."""
    num_prompt_tokens: int
    cache_salt: str | None
    sequence_number: int
    """Order of arrival in this scheduler."""
    sort_key: tuple[float, ...]
    """Place in the policy's order; the last of the running requests is preempted first."""
    max_num_tokens: int
    """Length at which it ends whatever is sampled: its ``max_tokens``, or the context's."""
    own_computed: int = 0
    """:attr:`num_computed_tokens`, likewise."""
    own_placeholders: int = 0
    own_in_flight: int = 0
    num_drafts: int = 0
    """Guesses that steps in flight may check."""
    group: DecodeGroup | None = None
    """The group that it is a member of, which keeps the next five."""
    group_column: int = 0
    """Where its tokens are kept."""
    group_scheduled: int = 0
    """Steps of the group up to which its own counters count what is scheduled."""
    group_taken: int = 0
    """Steps of the group up to which they count what came of it; before that of which it was no member."""
    group_moves: int = 0
    """Moves of the group up to which it is settled."""
    group_due: int = -1
    """The step of the group that looks at it."""
    goes_by_number: bool = False
    """True if the last that came of it was a token of :attr:`StepResult.tokens`."""
    quiet_until: int = 0
    """While fewer tokens than this are computed, it goes on by one token a step, and gains no block and
    reaches no limit by that; 0: it is looked at in each step."""
    quiet_until_known: int = 0
    """The same while it has placeholders."""
    told_epoch: int = -1
    """The epoch in which its outputs have said all that can be said of it but for further tokens; -1: they
    have not, or it has ended."""
    is_slow: bool = False
    """Nothing is scheduled behind a placeholder of it: its constraint takes long to match."""
    is_late: bool = False
    """Its placeholder is of a step that has ended without the token, which comes with a later one."""
    epoch: int = 0
    """Raised when results of steps in flight must not be taken any more."""
    status: RequestStatus = RequestStatus.WAITING
    held_by_worker: bool = False
    num_preemptions: int = 0
    num_cached_tokens: int = -1
    """Prompt tokens that came from the prefix cache at first scheduling; -1 = not yet scheduled."""
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Pieces of the prompt collected so far."""
    prompt_logprobs_pending: bool = False
    """Asked for and not yet handed out."""
    decoding_entry: InFlight | None = None
    """Kept, as it is the same for every token of an epoch."""
    adapter: KnownAdapter | None = None
    """That it is computed with."""
    num_to_compute: int = 0
    """While it waits among the shortest first: tokens that it lacked when the prefix cache was last asked, at
    least until its first token."""
    place: Place = Place.NOWHERE
    """Of a request with an adapter."""

    @classmethod
    def create(
        cls,
        request: CoreRequest,
        sequence_number: int,
        *,
        by_priority: bool,
        now: float,
        max_model_len: int,
    ) -> SchedulerRequest:
        key: tuple[float, ...] = (sequence_number,)
        if by_priority:
            key = (request.priority, request.arrival_time, sequence_number)
        return cls(
            request=request,
            request_id=request.request_id,
            own_token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            cache_salt=request.cache_salt,
            sequence_number=sequence_number,
            sort_key=key,
            max_num_tokens=_longest(request, max_model_len),
            queued_ts=now,
            prompt_logprobs_pending=request.params.prompt_logprobs is not None,
        )

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and known output tokens."""
        if self.group is not None and self.group_moves != self.group.num_moves:
            self.group.settle(self)
        return self.own_token_ids

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that are cached when the steps in flight end."""
        if self.group is not None and self.group_moves != self.group.num_moves:
            self.group.settle(self)
        return self.own_computed

    @num_computed_tokens.setter
    def num_computed_tokens(self, number: int) -> None:
        if self.group is not None and self.group_moves != self.group.num_moves:
            self.group.settle(self)
        self.own_computed = number

    @property
    def num_placeholders(self) -> int:
        """Tokens that steps in flight sample."""
        if self.group is not None and self.group_moves != self.group.num_moves:
            self.group.settle(self)
        return self.own_placeholders

    @num_placeholders.setter
    def num_placeholders(self, number: int) -> None:
        if self.group is not None and self.group_moves != self.group.num_moves:
            self.group.settle(self)
        self.own_placeholders = number

    @property
    def num_steps_in_flight(self) -> int:
        """Steps in flight that it has a part in."""
        if self.group is not None and self.group_moves != self.group.num_moves:
            self.group.settle(self)
        return self.own_in_flight

    @num_steps_in_flight.setter
    def num_steps_in_flight(self, number: int) -> None:
        if self.group is not None and self.group_moves != self.group.num_moves:
            self.group.settle(self)
        self.own_in_flight = number

    @property
    def num_tokens(self) -> int:
        """Known tokens and placeholders."""
        return len(self.all_token_ids) + self.own_placeholders

    @property
    def num_settled_tokens(self) -> int:
        """See :class:`headrace_engine.kv.contract.CachedSequence`."""
        return self.num_computed_tokens - self.num_drafts

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Prompt log-probabilities need every prompt position computed, once; so do results of
        pooling that are made of all tokens."""
        pooling = self.request.pooling
        if pooling is not None:
            return pooling.skip_reading_prefix_cache is True
        return self.prompt_logprobs_pending

    @property
    def prompt_embeds(self) -> PromptEmbeds | None:
        """See :class:`headrace_engine.kv.contract.CachedSequence`."""
        return self.request.prompt_embeds

    @property
    def media(self) -> Sequence[MediaInput]:
        """See :class:`headrace_engine.kv.contract.CachedSequence`."""
        return self.request.media

    @property
    def adapter_digest(self) -> str:
        """See :class:`headrace_engine.kv.contract.CachedSequence`."""
        return "" if self.adapter is None else self.adapter.digest

    @property
    def num_encoder_tokens(self) -> int:
        """See :class:`headrace_engine.kv.contract.CachedSequence`."""
        return self.request.num_encoder_tokens

    @property
    def token_finish_reason(self) -> str | None:
        """``stop``, ``length`` or None, judged by the last known token, which is an output token. (Stop
        strings are found where text is known.)

        A stop token counts from the ``min_tokens``-th output token on; it wins over a limit reached
        with the same token.
        """
        request, token_ids = self.request, self.all_token_ids
        if (
            token_ids[-1] in request.stop_token_ids
            and len(token_ids) - self.num_prompt_tokens >= request.params.min_tokens
        ):
            return "stop"
        return "length" if len(token_ids) >= self.max_num_tokens else None

    @property
    def is_quiet(self) -> bool:
        """True if nothing happens to it in the next step; see :attr:`quiet_until`."""
        computed = self.num_computed_tokens
        return computed < self.quiet_until or (
            computed < self.quiet_until_known and self.own_placeholders > 0
        )

    @property
    def may_join(self) -> bool:
        """True if nothing happens to it in the next few steps, and of its tokens nothing else is told."""
        return (
            self.goes_by_number
            and self.told_epoch == self.epoch
            and self.is_quiet
            and not self.ends_next
        )

    @property
    def ends_next(self) -> bool:
        """True if the token that the next step samples is its last."""
        return self.num_computed_tokens >= self.max_num_tokens - 2

    def keep_quiet(self, until: int, until_known: int) -> None:
        """Look at it again beyond these numbers of tokens (``KVCacheManager.quiet_until``), or at its end."""
        last = self.max_num_tokens - 1
        self.quiet_until = until if until < last else last
        self.quiet_until_known = until_known if until_known < last else last

    def disturb(self) -> None:
        """It does not go on as before: it is looked at, and told of, once more."""
        if self.group is not None:
            self.group.leave(self)
        self.quiet_until = self.quiet_until_known = 0
        self.told_epoch = -1

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED


def _longest(request: CoreRequest, max_model_len: int) -> int:
    """Tokens at which a request ends. A pooling one has no output, but counts as if its result were
    one token, for which it needs no room."""
    num_prompt_tokens = len(request.prompt_token_ids)
    if request.pooling is not None:
        return num_prompt_tokens + 1
    return min(num_prompt_tokens + request.max_tokens, max_model_len)
