"""The side of a process that mirrors rank 0's engine, and has one of its ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from headrace_core.engine import EngineStats
from headrace_core.errors import EngineDead, UnsupportedFeature
from headrace_core.lora import LoRARequest
from headrace_core.request import CoreRequest
from headrace_engine.clients.base import CoreClient, OutputSink
from headrace_engine.clients.wire import as_exception
from headrace_engine.messages import CoreOutput, CoreOutputs
from headrace_engine.mirrored.messages import (
    Added,
    Called,
    Died,
    Differs,
    Outputs,
    Ready,
    describe_call,
    digest,
    pack,
    receive,
)
from headrace_engine.multiproc.frames import BadFrame, send
from headrace_engine.multiproc.nodes.guest import GuestRank
from headrace_engine.multiproc.nodes.joining import Joined
from headrace_engine.multiproc.places import RankPlace
from headrace_engine.startup import StartupTimeline

logger = logging.getLogger(__name__)

SAME_SECONDS = 300.0
"""Longest time until rank 0's script asks for what this one has asked for."""
CLOSE_SECONDS = 60.0
"""Longest wait for rank 0 to close its engine, once this process has closed its own."""
_LOOK_SECONDS = 1.0


class _Asked(NamedTuple):
    """This process asks for something: a request, or the result of a call."""

    name: str
    """The request's id, or the call."""
    digest: str
    """"": it is a call."""
    when: float
    result: Future[Any] | None = None


class _RankZeroGone:
    """The connection to rank 0 has ended."""


class FollowingClient(CoreClient):
    """Takes the outputs of rank 0's engine for requests that are the same as its requests.

    Args:
        join: joins rank 0's engine.
        make: makes the worker of this process's rank.
    """

    def __init__(
        self,
        join: Callable[[], Joined],
        make: Callable[[RankPlace], Any],
        timeline: StartupTimeline | None = None,
    ) -> None:
        self.timeline = timeline or StartupTimeline()
        self._join, self._make = join, make
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._rank: GuestRank | None = None
        self._state: _Mirror | None = None

    @property
    def in_process(self) -> bool:
        """As of rank 0: its call has the objects, and what is printed of both calls' is compared."""
        return True

    def start(self, sink: OutputSink) -> None:
        with self.timeline.phase("join rank 0"):
            joined = self._join()
        self._rank = GuestRank(joined, self._make)
        self._state = state = _Mirror(sink, joined, self._events, self._rank)
        weakref.finalize(self, _end, self._rank, state)
        self._rank.start()
        for run, name in ((state.read, "headrace-mirror-reader"), (state.run, "headrace-mirror")):
            threading.Thread(target=run, name=name, daemon=True).start()
        with self.timeline.phase("wait for rank 0"):
            ready = state.ready.result()
        self.max_model_len, self.step_seconds = ready.max_model_len, ready.step_seconds
        self.memory_plan = ready.memory_plan
        self.timeline.finish()

    def add(self, requests: Sequence[CoreRequest]) -> None:
        self._running()
        now = time.monotonic()
        for request in requests:
            self._events.put(_Asked(request.request_id, digest(request), now))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Rank 0's script aborts the same requests."""

    def suspend(self, request_ids: Sequence[str]) -> None:
        """Likewise."""

    def resume(self, request_ids: Sequence[str]) -> None:
        """Likewise."""

    def stats(self, drain: bool = False) -> Future[EngineStats]:
        raise _rank_0s("stats")

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> Future[bool]:
        return self._call("reset_prefix_cache", (reset_running_requests,))

    def add_lora(self, request: LoRARequest) -> Future[bool]:
        return self._call("add_lora", (request.lora_int_id,))

    def remove_lora(self, lora_int_id: int) -> Future[bool]:
        return self._call("remove_lora", (lora_int_id,))

    def list_loras(self) -> Future[tuple[LoRARequest, ...]]:
        raise _rank_0s("list_loras")

    def call_workers(self, method: str, args: Sequence[Any] = ()) -> Future[list[Any]]:
        return self._call(method, args)

    @property
    def heartbeat_age(self) -> float:
        return 0.0

    @property
    def failure(self) -> BaseException | None:
        return None if self._state is None else self._state.failure

    def shutdown(self) -> None:
        if self._rank is not None and self._state is not None:
            _end(self._rank, self._state)

    def _call(self, method: str, args: Sequence[Any]) -> Future[Any]:
        self._running()
        result: Future[Any] = Future()
        self._events.put(_Asked(describe_call(method, args), "", time.monotonic(), result))
        return result

    def _running(self) -> None:
        if self._state is None:
            raise EngineDead("the engine was never started")
        if self._state.failure is not None:
            raise EngineDead(str(self._state.failure))


def _rank_0s(call: str) -> UnsupportedFeature:
    return UnsupportedFeature(
        f"{call}: only on rank 0 of the ranks that torchrun started for one engine", param=call
    )


def _end(rank: GuestRank, state: _Mirror) -> None:
    """Rank 0 may still run a pass in which this rank takes part."""
    state.closing = True
    if not rank.ended.wait(CLOSE_SECONDS):
        logger.warning("rank 0 has not closed its engine %g s after this rank has", CLOSE_SECONDS)
    rank.close()


class _Mirror:
    """What rank 0 has asked for and what this process has, in order; the thread :meth:`run` has it all."""

    def __init__(
        self, sink: OutputSink, joined: Joined, events: queue.SimpleQueue[Any], rank: GuestRank
    ) -> None:
        assert joined.mirror is not None
        self._sink, self._connection, self._events, self._rank = sink, joined.mirror, events, rank
        self.ready: Future[Ready] = Future()
        self.failure: BaseException | None = None
        self.closing = False
        self._asked: deque[_Asked] = deque()
        """Requests of this process that rank 0's have not been compared with."""
        self._led: deque[tuple[str, str]] = deque()
        """The reverse."""
        self._calls: deque[_Asked] = deque()
        self._called: deque[Called] = deque()
        self._names: dict[str, str] = {}
        """Rank 0's id of a request -> its id here."""
        self._early: list[tuple[CoreOutputs, CoreOutput]] = []
        """Outputs of requests that this process has not asked for yet."""
        self._end: EngineDead | None = None
        """Rank 0 is gone. What it was asked for until then, this process may ask for all the same."""

    def read(self) -> None:
        """The thread that hears rank 0."""
        try:
            while True:
                self._events.put(receive(self._connection))
        except (EOFError, OSError):
            self._events.put(_RankZeroGone())
        except BadFrame as error:
            self._events.put(error)

    def run(self) -> None:
        """Until the engine ends."""
        while self.failure is None:
            try:
                event = self._events.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                self._look_for_late()
                continue
            self._take(event)
            if self._end is not None and not (self._led or self._called) and self.failure is None:
                self._fail(self._end)

    def _take(self, event: Any) -> None:
        if isinstance(event, Outputs):
            self._deliver(event.outputs)
        elif isinstance(event, _Asked):
            (self._calls if event.result is not None else self._asked).append(event)
            self._match()
        elif isinstance(event, Added):
            self._led += event.requests
            self._match()
        elif isinstance(event, Called):
            self._called.append(event)
            self._match()
        elif isinstance(event, _RankZeroGone):
            self._end = EngineDead("rank 0 of this engine is gone")
        elif isinstance(event, Ready):
            self.ready.set_result(event)
        elif isinstance(event, Died):
            self._fail(as_exception(event.error))
        else:
            self._fail(event if isinstance(event, BaseException) else BadFrame(f"{event!r:.200}"))

    def _match(self) -> None:
        while self._asked and self._led and self.failure is None:
            own, (name, theirs) = self._asked.popleft(), self._led.popleft()
            if own.digest != theirs:
                self._differ("a request that is not rank 0's: prompts or parameters differ")
                return
            self._names[name] = own.name
        while self._calls and self._called and self.failure is None:
            call, done = self._calls.popleft(), self._called.popleft()
            assert call.result is not None
            if call.name != done.call:
                self._calls.appendleft(call)
                self._differ(f"{call.name:.200}, and rank 0 asked for {done.call:.200}")
            elif done.error is not None:
                call.result.set_exception(as_exception(done.error))
            else:
                call.result.set_result(done.result)
        early, self._early = self._early, []
        for outputs, output in early:
            self._deliver(dataclasses.replace(outputs, outputs=[output], tokens={}))

    def _deliver(self, outputs: CoreOutputs) -> None:
        found, earlier = [], outputs.earlier_versions
        named = earlier and {self._names.get(key, key): value for key, value in earlier.items()}
        going_on = [CoreOutput(request_id, [one]) for request_id, one in outputs.tokens.items()]
        for output in [*outputs.outputs, *going_on]:
            name = self._names.get(output.request_id)
            if name is None:
                self._early.append((outputs, output))
                continue
            if output.finish_reason is not None:
                del self._names[output.request_id]
            found.append(dataclasses.replace(output, request_id=name))
        if found:
            self._sink.on_outputs(
                dataclasses.replace(
                    outputs, outputs=found, timed=None, earlier_versions=named, tokens={}
                )
            )

    def _look_for_late(self) -> None:
        oldest = time.monotonic() - SAME_SECONDS
        if any(asked.when < oldest for asked in (*self._asked, *self._calls)):
            self._differ(f"something that rank 0 has not asked for within {SAME_SECONDS:g} s")

    def _differ(self, what: str) -> None:
        reason = (
            f"rank {self._rank.rank} of this engine asked for {what}; all ranks of one engine that torchrun "
            "starts must make the same calls in the same order"
        )
        with contextlib.suppress(OSError):
            send(self._connection, pack(Differs(reason)))
        self._fail(EngineDead(reason))

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        if not self.ready.done():
            self.ready.set_exception(EngineDead(f"rank 0 did not start the engine: {error}"))
        for call in self._calls:
            assert call.result is not None
            call.result.set_exception(EngineDead(str(error)))
        if not self.closing:
            self._sink.on_death(error)
