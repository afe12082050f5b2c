"""All requests of a scheduler, and where each of them is: waiting, running, suspended, or gone.

What a request holds changes hands here and nowhere else: its place in the queue, its blocks, its
state in the worker.
"""

from __future__ import annotations

import bisect
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from headrace_core.request import CoreRequest
from headrace_engine.config import SchedulerConfig
from headrace_engine.kv.contract import KVCacheManager
from headrace_engine.kv_transfer.scheduler import KVTransfer
from headrace_engine.messages import CoreOutput
from headrace_engine.scheduler.adapter_slots import Place, SlotPlanner
from headrace_engine.scheduler.decode_group import DecodeGroup
from headrace_engine.scheduler.queue import FairQueue, FCFSQueue, PriorityQueue, WaitingQueue
from headrace_engine.scheduler.request import RequestStatus, SchedulerRequest, by_order
from headrace_engine.scheduler.shortest_first import ShortestFirstQueue

logger = logging.getLogger(__name__)

MAX_KEPT_STEPS = 4096
"""Steps whose sizes are kept for a snapshot that nobody takes."""
MIN_RETRY_AFTER, MAX_RETRY_AFTER = 1.0, 60.0


@dataclass(slots=True)
class DraftCounters:
    """Guesses, and those that were right; they never fall."""

    num_drafts: int = 0
    """Runs of guesses that were checked."""
    num_draft_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    """Right guesses by their place in the run."""

    def count(self, num_drafted: int, num_right: int) -> None:
        """A run was checked."""
        if not num_drafted:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        accepted = self.accepted_per_position
        accepted += [0] * (num_drafted - len(accepted))
        for position in range(num_right):
            accepted[position] += 1


@dataclass(slots=True)
class SchedulerCounters:
    """Running totals; they never fall."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_steps: int = 0
    iteration_tokens: int = 0
    step_tokens: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_STEPS))
    drafts: DraftCounters = field(default_factory=DraftCounters)

    def count_step(self, num_tokens: int) -> None:
        self.num_steps += 1
        self.iteration_tokens += num_tokens
        self.step_tokens.append(num_tokens)

    def take_prefix_cache(self, kv: KVCacheManager) -> None:
        stats = kv.take_stats()
        self.prefix_cache_queries += stats.queries
        self.prefix_cache_hits += stats.hits


class AdmissionRate:
    """The rate at which requests leave the queue, measured over the last few."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=64)

    def record(self, now: float) -> None:
        """A request left the queue for the first time."""
        self._times.append(now)

    def retry_after(self, now: float) -> float:
        """Seconds until a place in the queue should be free, within 1..60."""
        if not self._times:
            return MIN_RETRY_AFTER
        # Up to now, not up to the last one: a queue that has stopped moving looks slow.
        interval = (now - self._times[0]) / len(self._times)
        return min(max(interval, MIN_RETRY_AFTER), MAX_RETRY_AFTER)


class RunningRequests:
    """Running requests by :attr:`SchedulerRequest.sort_key`: whoever is last is preempted first.

    Beside the requests it keeps what a step of thousands is made from without looking at them: their ids, and
    those of them that are not in the group that decodes.
    """

    def __init__(self) -> None:
        self._states: dict[SchedulerRequest, None] = {}
        """In the policy's order unless they are stale; a mapping, as many end in a step, anywhere in it."""
        self.outside: dict[SchedulerRequest, None] = {}
        """Requests in no :class:`~headrace_engine.scheduler.decode_group.DecodeGroup`, in any order."""
        self._one_each: dict[str, int] = {}
        """One token for each id, in the order of the requests."""
        self._is_stale = False
        self._is_shared = False
        """True if the last steps have that mapping: it must not be changed any more."""

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[SchedulerRequest]:
        return iter(self._in_order())

    def __reversed__(self) -> Iterator[SchedulerRequest]:
        return reversed(self._in_order())

    def __contains__(self, state: SchedulerRequest) -> bool:
        return state in self._states

    def add(self, state: SchedulerRequest) -> None:
        """Put a request into its place."""
        last = next(reversed(self._states), None)
        if last is not None and last.sort_key > state.sort_key:
            self._is_stale = True
        self._states[state] = None
        self._own_one_each()[state.request_id] = 1
        self.outside[state] = None

    def remove(self, state: SchedulerRequest) -> None:
        """Take a request out.

        Raises:
            ValueError: it does not run.
        """
        if state not in self._states:
            raise ValueError(f"{state.request_id!r} does not run")
        del self._states[state]
        self._forget(state)

    def pop(self) -> SchedulerRequest:
        """Take the last one out. KeyError if nobody runs."""
        state, _ = self._in_order().popitem()
        self._forget(state)
        return state

    def drop(self, ended: Iterable[SchedulerRequest]) -> None:
        """Take out requests that have ended; those that are not here are passed over."""
        for state in ended:
            if state in self._states:
                self.remove(state)

    def behind(self, state: SchedulerRequest) -> list[SchedulerRequest]:
        """The requests after one, in order."""
        states = list(self._in_order())
        return states[bisect.bisect_right(states, state.sort_key, key=by_order) :]

    def counts(self, outside: Mapping[str, int], *, may_share: bool) -> tuple[dict[str, int], bool]:
        """Tokens of a step, by id in the policy's order, in which all that are not :attr:`outside` have one.

        Args:
            outside: tokens of others, by id; those that are not among them have no part in the step.
            may_share: steps in which each of the same requests has one token may have one mapping.

        Returns:
            The mapping, and whether it is shared, and so must not be changed.
        """
        self._in_order()
        others = [
            (state.request_id, count)
            for state in self.outside
            if (count := outside.get(state.request_id, 0)) != 1
        ]
        if may_share and not others:
            self._is_shared = True
            return self._one_each, True
        found = self._one_each.copy()
        for request_id, count in others:
            if count:
                found[request_id] = count
            else:
                del found[request_id]
        return found, False

    def _forget(self, state: SchedulerRequest) -> None:
        if state.group is not None:
            state.group.leave(state)
        del self.outside[state]
        del self._own_one_each()[state.request_id]

    def _in_order(self) -> dict[SchedulerRequest, None]:
        if self._is_stale:
            states = sorted(self._states, key=by_order)
            self._states = dict.fromkeys(states)
            self._one_each = dict.fromkeys([state.request_id for state in states], 1)
            self._is_stale = self._is_shared = False
        return self._states

    def _own_one_each(self) -> dict[str, int]:
        """The mapping of ones, to be changed."""
        if self._is_shared:
            self._one_each = self._one_each.copy()
            self._is_shared = False
        return self._one_each


class RequestTracker:
    """The requests of one scheduler.

    Args:
        config: the policy.
        kv: hands out blocks.
        max_model_len: longest sequence, in tokens.
        clock: monotonic seconds.
        adapters: hands out slots; None: no request has an adapter.
        transfer: is told who leaves the queue; None: nobody asks.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        max_model_len: int,
        clock: Callable[[], float],
        adapters: SlotPlanner | None = None,
        transfer: KVTransfer | None = None,
    ) -> None:
        self.requests: dict[str, SchedulerRequest] = {}
        """By id: all that have not ended."""
        self.running = RunningRequests()
        self.decoding = DecodeGroup(self.running)
        self.fair = FairQueue(config.fair_weights) if config.policy == "fair" else None
        self.waiting: WaitingQueue = FCFSQueue()
        if self.fair is not None:
            self.waiting = self.fair
        elif config.policy == "priority":
            self.waiting = PriorityQueue()
        elif config.target_ttft is not None:
            self.waiting = ShortestFirstQueue(config.target_ttft, self._num_to_compute, clock)
        self.num_suspended = 0
        """Requests that are in neither."""
        self.counters = SchedulerCounters()
        self.admissions = AdmissionRate()
        self.stop_token_ids: set[int] = set()
        """Of all requests, and of some that have ended."""
        self.gone: list[str] = []
        """Requests that the worker must forget, since the last step."""
        self.adapters = adapters
        self._transfer = transfer
        self._by_priority = config.policy == "priority"
        self._kv = kv
        self._max_model_len = max_model_len
        self._clock = clock
        self._num_added = 0
        self._ended: list[SchedulerRequest] = []
        """Those that ran, until they are dropped."""

    def add(self, request: CoreRequest) -> None:
        """Queue a request that has been checked."""
        state = SchedulerRequest.create(
            request,
            self._num_added,
            by_priority=self._by_priority,
            now=self._clock(),
            max_model_len=self._max_model_len,
        )
        if self.adapters is not None:
            self.adapters.enter(state)
        self._num_added += 1
        if not self.requests:
            self.stop_token_ids = set()
        self.stop_token_ids |= request.stop_token_ids
        self.requests[state.request_id] = state
        self.waiting.push(state)
        self._move(state, Place.QUEUE)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, and those that are set aside."""
        return len(self.waiting) + (0 if self.adapters is None else self.adapters.num_aside)

    def set_aside(self, state: SchedulerRequest) -> None:
        """A request, already out of the queue, waits for a slot."""
        self._move(state, Place.ASIDE)

    def put_back(self, states: Iterable[SchedulerRequest]) -> None:
        """Requests that were set aside go back to their places in the queue."""
        states = list(states)
        for state in states:
            self._move(state, Place.QUEUE)
        self.waiting.put_back(states)

    def take_out(self, state: SchedulerRequest) -> None:
        """Take a request out of wherever it waits."""
        if state.place is not Place.ASIDE:
            self.waiting.take(state)
        self._move(state, Place.NOWHERE)

    def admit(self, state: SchedulerRequest, num_cached_tokens: int) -> None:
        """A request, already out of the queue, runs from now on."""
        if state.num_cached_tokens < 0:
            now = self._clock()
            state.num_cached_tokens, state.scheduled_ts = num_cached_tokens, now
            self.admissions.record(now)
            if self.fair is not None:
                self.fair.charge(state.request.owner, state.num_tokens - num_cached_tokens)
        # Pieces from before a preemption: the prompt is computed again from its beginning.
        state.prompt_logprobs.clear()
        state.num_computed_tokens = num_cached_tokens
        state.status = RequestStatus.RUNNING
        self._move(state, Place.RUNNING)
        self._leave_queue(state)
        state.held_by_worker = True
        self.running.add(state)

    def preempt(self, state: SchedulerRequest) -> None:
        """Take a request, already out of the running list, back to the queue."""
        # First: what it has computed becomes findable for its own return.
        self._kv.free(state.request_id)
        state.num_computed_tokens = 0
        state.disturb()
        state.status = RequestStatus.PREEMPTED
        state.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._forget_in_worker(state)
        self.waiting.push_back_first(state)
        self._move(state, Place.QUEUE)

    def suspend(self, state: SchedulerRequest) -> None:
        """Take a running or waiting request out of steps and queue. What it holds is freed."""
        if state.status is RequestStatus.RUNNING:
            self.running.remove(state)
            self._kv.free(state.request_id)
            state.num_computed_tokens = 0
            state.disturb()
            self._forget_in_worker(state)
            self._move(state, Place.NOWHERE)
        else:
            self.take_out(state)
        state.status = RequestStatus.SUSPENDED
        self.num_suspended += 1
        self._leave_queue(state)

    def resume(self, state: SchedulerRequest) -> None:
        """Put a suspended request back into the queue, in front of those that never ran."""
        self.num_suspended -= 1
        state.status = RequestStatus.PREEMPTED
        self.waiting.push_back_first(state)
        self._move(state, Place.QUEUE)

    def preempt_all(self) -> None:
        """Send every running request back to the queue; their tokens are kept."""
        while self.running:
            self.preempt(self.running.pop())

    def end(self, state: SchedulerRequest, reason: str, *, error: str | None = None) -> CoreOutput:
        """Free what a request holds; the caller takes it out of the running list."""
        if state.status is RequestStatus.SUSPENDED:
            self.num_suspended -= 1
        elif state.status is RequestStatus.RUNNING:
            self._ended.append(state)
        elif state.place is not Place.ASIDE:
            state.status = RequestStatus.FINISHED
            self.waiting.discard()
        state.status = RequestStatus.FINISHED
        if self.adapters is not None:
            self.adapters.leave(state)
        self._leave_queue(state)
        self._kv.free(state.request_id)
        self._forget_in_worker(state)
        state.decoding_entry = None  # it refers back to the state
        state.disturb()
        del self.requests[state.request_id]
        output = output_of(state)
        output.finish_reason, output.error = reason, error
        if self._transfer is not None and reason in ("stop", "length"):
            output.kv_transfer_params = self._transfer.answer(state.request)
        return output

    def end_raising(self, state: SchedulerRequest, error: Exception) -> CoreOutput:
        """End a request because something raised when it was looked at."""
        logger.error("request %s ends: %s", state.request_id, error, exc_info=error)
        message = f"{type(error).__name__}: {error}"
        if not state.finished:
            return self.end(state, "error", error=message)
        output = output_of(state)
        output.finish_reason, output.error = "error", message
        return output

    def drop_finished(self) -> None:
        """Take what has ended out of the running list."""
        ended, self._ended = self._ended, []
        self.running.drop(ended)

    @property
    def has_late(self) -> bool:
        """True if a token that an ended step sampled is not known yet."""
        return any(state.is_late for state in self.running)

    def count_adapters(self) -> tuple[dict[str, int], dict[str, int]]:
        """Numbers of requests that run, and that wait, by the name of their adapter."""
        running, waiting = Counter[str](), Counter[str]()
        for state in self.requests.values():
            lora = state.request.lora_request
            if lora is not None and state.status is not RequestStatus.SUSPENDED:
                runs = state.status is RequestStatus.RUNNING
                (running if runs else waiting)[lora.lora_name] += 1
        return dict(running), dict(waiting)

    def _move(self, state: SchedulerRequest, place: Place) -> None:
        if self.adapters is not None:
            self.adapters.move(state, place)

    def _num_to_compute(self, state: SchedulerRequest) -> int:
        """Tokens that a request in the queue lacks, but for those that the prefix cache holds now."""
        try:
            return state.num_tokens - self._kv.match_prefix(state).num_tokens
        except Exception:  # raised again, and told of, when it is its turn
            logger.debug("request %s: no prefix looked up", state.request_id, exc_info=True)
            return state.num_tokens

    def _leave_queue(self, state: SchedulerRequest) -> None:
        if self._transfer is not None:
            self._transfer.forget(state.request_id)

    def _forget_in_worker(self, state: SchedulerRequest) -> None:
        if state.held_by_worker:
            state.held_by_worker = False
            # The worker forgets the logits, too, and the token is sampled again; unless a step in flight
            # has the request: it brings the late token with the next one.
            if state.is_late and not state.num_steps_in_flight:
                state.is_late = False
                state.num_placeholders -= 1
            self.gone.append(state.request_id)


def output_of(state: SchedulerRequest) -> CoreOutput:
    """An output that says nothing new of a request. By position: one is made for every token."""
    return CoreOutput(
        state.request_id, [], None, None, None, None, None, max(state.num_cached_tokens, 0),
        state.num_preemptions, state.queued_ts, state.scheduled_ts,
    )  # fmt: skip
