"""Callers in several threads, one core: :class:`Calls` knows whose each output is.

No thread stands between the core and its callers. Of those that wait, one takes in the next step for all, so
a caller that is alone gets its outputs without a task switch.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from typing import NamedTuple

from headrace_core.errors import EngineDead, GenerateError
from headrace_core.output import RequestOutput
from headrace_core.text import Tokenizer
from headrace_engine.clients.base import CoreClient
from headrace_engine.clients.sink import dead_again
from headrace_engine.emission.pooled import PooledOutput
from headrace_engine.emission.processor import Followed, OutputProcessor
from headrace_engine.intake.prepared import PreparedRequest
from headrace_engine.messages import CoreOutputs

logger = logging.getLogger(__name__)

LOOK_AGAIN = 1.0
"""Seconds after which a waiting caller looks whether the core still lives."""


class News(NamedTuple):
    """What is new of one request."""

    request_id: str
    output: RequestOutput | PooledOutput | None
    """None: the request ended without any."""
    finished: bool
    """Whether this is the last news of it."""
    error: BaseException | None
    """Why the request failed."""


class Calls:
    """All requests that are under way, by the calls that made them. Thread-safe.

    It is the sink of the core's outputs.

    Args:
        client: the way to the core.
        tokenizer: None: outputs have no text.
    """

    def __init__(self, client: CoreClient, tokenizer: Tokenizer | None) -> None:
        self._client = client
        self._inbox: queue.SimpleQueue[CoreOutputs | BaseException] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # All below is guarded by the lock.
        self._processor = OutputProcessor(tokenizer)
        self._owners: dict[str, Call] = {}
        self._waiting: list[Call] = []
        self._end: BaseException | None = None
        """Why no more outputs come."""
        self._taking = False
        """Whether a caller takes in the next step."""

    def open(self) -> Call:
        """A new call, without requests yet."""
        return Call(self, self._lock)

    def close(self) -> None:
        """Make every caller that waits, now or later, raise. Idempotent."""
        self.on_death(EngineDead("the engine is shut down"))

    # OutputSink: called from a thread of the client's.

    def on_outputs(self, outputs: CoreOutputs) -> None:
        """Queue a step's outputs."""
        self._inbox.put(outputs)

    def on_death(self, error: BaseException) -> None:
        """Make callers raise."""
        self._inbox.put(error)

    # For calls.

    def add(self, call: Call, request: PreparedRequest) -> None:
        """See :meth:`Call.add`."""
        with self._lock:
            if self._end is not None:
                raise dead_again(self._end)
            state = self._processor.add(request)
            self._owners[request.request_id] = call
            call.under_way[request.request_id] = state
        try:
            self._client.add(request.core_requests)
        except BaseException:
            with self._lock:
                self._forget(state)
            raise

    def wait(self, call: Call) -> list[News]:
        """See :meth:`Call.wait`."""
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

    def end(self, call: Call, request_ids: Sequence[str], finish_reason: str) -> None:
        """See :meth:`Call.abort`."""
        with self._lock:
            own = [request_id for request_id in request_ids if request_id in call.under_way]
            processed = self._processor.end(own, finish_reason)
            self._hand_out(processed.changed)
        self._client.abort(processed.abort_core_ids)

    def drop(self, call: Call) -> None:
        """See :meth:`Call.close`."""
        with self._lock:
            left = [core for state in list(call.under_way.values()) for core in self._forget(state)]
        if left and self._client.failure is None:
            self._client.abort(left)

    # The lock is held in all below but `_take_in` and `_receive`.

    def _take(self, call: Call) -> list[News]:
        changed, call.fresh = call.fresh, {}
        news = []
        for request_id, state in changed.items():
            news.append(News(request_id, state.take(), state.finished, state.error))
            if state.finished:
                self._forget(state)
                if state.error is not None:
                    logger.error("%s", state.error)
        return news

    def _wait_for_others(self, call: Call) -> None:
        self._waiting.append(call)
        try:
            call.woken.wait(LOOK_AGAIN)
        finally:
            self._waiting.remove(call)

    def _take_in(self, call: Call) -> None:
        """Wait for a step's outputs and give every call its own."""
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

    def _hand_out(self, changed: Sequence[Followed]) -> None:
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
        """The caller that took in a step was interrupted: nobody knows how far it came."""
        states = self._processor.states
        processed = self._processor.end([state.request.request_id for state in states], "error")
        for state in states:
            state.error = GenerateError(
                f"request {state.request.request_id!r} ended: the thread that took in a step for all "
                "was interrupted"
            )
        self._hand_out(processed.changed)
        self._client.abort(processed.abort_core_ids)

    def _lost(self, call: Call, why: BaseException) -> EngineDead:
        for state in list(call.under_way.values()):
            self._forget(state)
        return dead_again(why)

    def _forget(self, state: Followed) -> list[str]:
        """Follow a request no longer; returns what the core must abort. Idempotent."""
        request_id = state.request.request_id
        call = self._owners.pop(request_id, None)
        if call is not None:
            call.under_way.pop(request_id, None)
            call.fresh.pop(request_id, None)
        return self._processor.remove(state)


class Call:
    """Requests of one caller, whose outputs nobody else takes. Leaving the ``with`` block ends them."""

    def __init__(self, calls: Calls, lock: threading.Lock) -> None:
        self._calls = calls
        # Guarded by the lock, and the business of Calls:
        self.under_way: dict[str, Followed] = {}
        """Requests whose last news was not taken."""
        self.fresh: dict[str, Followed] = {}
        """Those that have news."""
        self.woken = threading.Condition(lock)

    @property
    def num_unfinished(self) -> int:
        """Requests of which :meth:`wait` has more to tell."""
        return len(self.under_way)

    def add(self, request: PreparedRequest) -> None:
        """Start a request.

        Raises:
            RequestError: its id is in use, in any call.
            EngineDead: the engine stopped.
        """
        self._calls.add(self, request)

    def wait(self) -> list[News]:
        """Wait for news of requests; [] at once if nothing is under way.

        Raises:
            EngineDead: the engine stopped; all requests of the call are gone.
        """
        return self._calls.wait(self)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests of this call with reason ``abort``; their last news comes with :meth:`wait`."""
        self._calls.end(self, request_ids, "abort")

    def close(self) -> None:
        """End what is left, of which nobody will ask for more."""
        if self.under_way:
            self._calls.drop(self)

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
