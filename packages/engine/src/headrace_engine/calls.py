"""Several threads share one core: :class:`OfflineCalls` hands each caller the outputs of its own requests.

No thread stands between the core and its callers. One of the callers that wait takes in the next step for all
of them, so a caller that is alone gets its outputs without a task switch.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from headrace_core.errors import EngineAsleep, EngineDead, GenerateError
from headrace_core.output import RequestOutput
from headrace_engine.clients.base import dead_again
from headrace_engine.front import EngineFront
from headrace_engine.input_processing.prepared import PreparedRequest
from headrace_engine.messages import CoreOutputs
from headrace_engine.output_processing.output_processor import FollowedRequest
from headrace_engine.output_processing.pooled import PooledOutput

logger = logging.getLogger(__name__)

LOOK_AGAIN = 1.0
"""Seconds after which a waiting caller checks that the core still runs."""


class RequestUpdate(NamedTuple):
    """An update of one request for the call that made it."""

    request_id: str
    output: RequestOutput | PooledOutput | None
    """The new output; None: the request ended without one."""
    finished: bool
    """True: no further update of this request comes."""
    error: BaseException | None
    """The reason for which the request failed, or None."""


class OfflineRequestWatch(Protocol):
    """Follows one request that generates, for metrics."""

    def saw(self, output: RequestOutput) -> None:
        """Take note of an output before its caller gets it."""
        ...

    def ended(self) -> None:
        """Take note that no more outputs come; called once, also for a request that was dropped."""
        ...


class RequestObserver(Protocol):
    """Follows all requests of an engine that generate. Its methods are called with the engine's lock
    held: they return at once, and must not raise."""

    def begin(self, request: PreparedRequest) -> OfflineRequestWatch:
        """Follow a request that goes to the core now."""
        ...


class OfflineCalls:
    """The requests that are under way, by the calls that made them. Thread-safe.

    It is the sink of the core's outputs.

    Args:
        front: hands requests to the core.
        observer: follows every request that generates; None: nobody does.
    """

    def __init__(
        self,
        front: EngineFront,
        observer: RequestObserver | None = None,
    ) -> None:
        self._front = front
        self._client = front.client
        self._observer = observer
        self._inbox: queue.SimpleQueue[CoreOutputs | BaseException] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # All below is guarded by the lock.
        self._processor = front.processor
        self._owners: dict[str, OfflineCall] = {}
        self._watches: dict[str, OfflineRequestWatch] = {}
        self._waiting: list[OfflineCall] = []
        self._end: BaseException | None = None
        """The reason for which no more outputs come; None while the core runs."""
        self._taking = False
        """True while a caller takes in the next step."""
        self._pausing: OfflineCall | None = None
        """The call of the thread for which no request begins; None: requests begin."""
        self._resumed = threading.Condition(self._lock)

    def open(self) -> OfflineCall:
        """Make a call that has no requests yet."""
        return OfflineCall(self, self._lock)

    def close(self) -> None:
        """Make every caller that waits, now or later, raise. Idempotent."""
        self.on_death(EngineDead("the engine is shut down"))

    @contextmanager
    def paused(self, *, wait: bool) -> Iterator[None]:
        """Within the ``with`` block no request runs: those of other calls begin after it. A caller that
        pauses while another does waits for its turn.

        Args:
            wait: those that run end first; False: they end now, with reason ``abort``.

        Raises:
            EngineDead: the engine stopped.
            EngineError: the thread is the engine's own.
        """
        self._client.check_caller()
        own = self.open()
        with self._lock:
            self._wait_for_resumption()
            self._pausing = own
            running = {owner: list(owner.under_way) for owner in self._owners.values()}
        try:
            if not wait:
                for owner, request_ids in running.items():
                    self.end(owner, request_ids, "abort")
                self._inbox.put(CoreOutputs([], time.monotonic()))  # wakes whoever takes in a step
            self._drain(own)
            yield
        finally:
            with self._lock:
                self._pausing = None
                self._resumed.notify_all()

    def _drain(self, own: OfflineCall) -> None:
        """Take in steps, or wait for those who do, until no request runs."""
        while True:
            with self._lock:
                if self._end is not None:
                    raise dead_again(self._end)
                if not self._runs_something():
                    return
                if self._taking:
                    self._wait_for_others(own)
                    continue
                self._taking = True
            self._take_in(own)

    # OutputSink: called from a thread of the client's.

    def on_outputs(self, outputs: CoreOutputs) -> None:
        """Queue a step's outputs."""
        self._inbox.put(outputs)

    def on_death(self, error: BaseException) -> None:
        """Make callers raise."""
        self._inbox.put(error)

    # For calls.

    def add(self, call: OfflineCall, request: PreparedRequest) -> None:
        """See :meth:`OfflineCall.add`."""
        with self._lock:
            self._wait_for_resumption()
            state = self._front.begin(request)
            self._owners[request.request_id] = call
            call.under_way[request.request_id] = state
            if self._observer is not None and request.pooling is None:
                self._watches[request.request_id] = self._observer.begin(request)

    def wait(self, call: OfflineCall) -> list[RequestUpdate]:
        """See :meth:`OfflineCall.wait`."""
        self._client.check_caller()
        while True:
            with self._lock:
                if call.fresh or not call.under_way:
                    return self._take(call)
                if self._end is not None:
                    raise self._lost(call, self._end)
                if self._taking:
                    self._wait_for_others(call)
                    continue
                self._taking = True
            self._take_in(call)

    def end(self, call: OfflineCall, request_ids: Sequence[str], finish_reason: str) -> None:
        """See :meth:`OfflineCall.abort`."""
        with self._lock:
            own = [request_id for request_id in request_ids if request_id in call.under_way]
            processed = self._processor.end(own, finish_reason)
            self._hand_out(processed.changed)
        self._client.abort(processed.abort_core_ids)

    def drop(self, call: OfflineCall) -> None:
        """See :meth:`OfflineCall.close`."""
        with self._lock:
            left = [core for state in list(call.under_way.values()) for core in self._forget(state)]
        if left and self._client.failure is None:
            self._client.abort(left)

    # The lock is held in all below but `_take_in` and `_receive`.

    def _wait_for_resumption(self) -> None:
        while self._pausing is not None and self._end is None:
            self._resumed.wait(LOOK_AGAIN)
        if self._end is not None:
            raise dead_again(self._end)

    def _runs_something(self) -> bool:
        return any(
            not s.finished for owner in self._owners.values() for s in owner.under_way.values()
        )

    def _take(self, call: OfflineCall) -> list[RequestUpdate]:
        changed, call.fresh = call.fresh, {}
        updates = []
        for request_id, state in changed.items():
            output = state.take()
            updates.append(RequestUpdate(request_id, output, state.finished, state.error))
            watch = self._watches.get(request_id)
            if watch is not None and isinstance(output, RequestOutput):
                watch.saw(output)
            if state.finished:
                self._forget(state)
                if state.error is not None:
                    logger.error("%s", state.error)
        _check_awake(updates)
        return updates

    def _wait_for_others(self, call: OfflineCall) -> None:
        self._waiting.append(call)
        try:
            call.woken.wait(LOOK_AGAIN)
        finally:
            self._waiting.remove(call)

    def _take_in(self, call: OfflineCall) -> None:
        """Wait for a step's outputs and give each call the outputs of its requests."""
        received: CoreOutputs | BaseException | None = None
        try:
            received = self._receive()
            with self._lock:
                self._sort(received)
                received = None
        finally:
            with self._lock:
                self._taking = False
                if received is not None:
                    self._fail_all()
                if call.fresh or not call.under_way or received is not None:
                    self._let_another_take()

    def _receive(self) -> CoreOutputs | BaseException:
        while True:
            try:
                return self._inbox.get(timeout=LOOK_AGAIN)
            except queue.Empty:
                if self._client.failure is not None:
                    return self._client.failure

    def _sort(self, received: CoreOutputs | BaseException) -> None:
        if not isinstance(received, CoreOutputs):
            self._end = received
            for waiting in self._waiting:
                waiting.woken.notify_all()
            return
        processed = self._processor.process(received)
        if processed.abort_core_ids:
            self._client.abort(processed.abort_core_ids)
        self._hand_out(processed.changed)
        if self._pausing is not None and not self._runs_something():
            self._pausing.woken.notify_all()

    def _hand_out(self, changed: Sequence[FollowedRequest]) -> None:
        for state in changed:
            if state.ready:
                owner = self._owners[state.request.request_id]
                owner.fresh[state.request.request_id] = state
                owner.woken.notify_all()

    def _let_another_take(self) -> None:
        for waiting in self._waiting:
            if not waiting.fresh:
                waiting.woken.notify_all()
                return

    def _fail_all(self) -> None:
        """End all requests: the caller that took in a step was interrupted, so outputs are lost."""
        states = self._processor.states
        processed = self._processor.end([state.request.request_id for state in states], "error")
        for state in states:
            state.error = GenerateError(
                f"request {state.request.request_id!r} ended: the thread that took in a step for all "
                "was interrupted"
            )
        self._hand_out(processed.changed)
        self._client.abort(processed.abort_core_ids)

    def _lost(self, call: OfflineCall, why: BaseException) -> EngineDead:
        for state in list(call.under_way.values()):
            self._forget(state)
        return dead_again(why)

    def _forget(self, state: FollowedRequest) -> list[str]:
        """Stop following a request; returns the ids that the core must abort. Idempotent."""
        request_id = state.request.request_id
        watch = self._watches.pop(request_id, None)
        if watch is not None:
            watch.ended()
        call = self._owners.pop(request_id, None)
        if call is not None:
            call.under_way.pop(request_id, None)
            call.fresh.pop(request_id, None)
        return self._processor.remove(state)


class OfflineCall:
    """The requests of one caller; nobody else takes their outputs. Leaving the ``with`` block aborts
    the requests that still run."""

    def __init__(self, calls: OfflineCalls, lock: threading.Lock) -> None:
        self._calls = calls
        # Guarded by the lock, and changed by OfflineCalls only:
        self.under_way: dict[str, FollowedRequest] = {}
        """Requests whose last update was not taken."""
        self.fresh: dict[str, FollowedRequest] = {}
        """Requests that have an update to take."""
        self.woken = threading.Condition(lock)

    @property
    def num_unfinished(self) -> int:
        """Number of requests of which :meth:`wait` will return more."""
        return len(self.under_way)

    def add(self, request: PreparedRequest) -> None:
        """Start a request.

        Raises:
            RequestError: its id is in use, in any call.
            EngineDead: the engine stopped.
        """
        self._calls.add(self, request)

    def wait(self) -> list[RequestUpdate]:
        """Wait for updates of requests; returns [] at once if nothing is under way.

        Raises:
            EngineDead: the engine stopped; all requests of the call are gone.
            EngineAsleep: the engine sleeps, and refused the requests.
            EngineError: the thread is the engine's own.
        """
        return self._calls.wait(self)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests of this call with reason ``abort``; :meth:`wait` returns their last updates."""
        self._calls.end(self, request_ids, "abort")

    def close(self) -> None:
        """Abort the requests that still run; their outputs are dropped. Idempotent."""
        if self.under_way:
            self._calls.drop(self)

    def __enter__(self) -> OfflineCall:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_awake(updates: Sequence[RequestUpdate]) -> None:
    """Raises: EngineAsleep, each request was refused for that; or else outputs of others would be lost."""
    errors = [update.error for update in updates]
    if errors and errors[0] is not None and all(isinstance(one, EngineAsleep) for one in errors):
        raise errors[0]
