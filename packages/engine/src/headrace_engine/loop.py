"""The loop: schedule, execute, update.

Two loops with the same parts. :meth:`EngineLoop._simple_step` runs one step after the other and
explains the other one; :meth:`EngineLoop._overlapped_step` schedules step t+1 before step t's
result is known, so that scheduling, updating and whatever consumers do with the outputs happen
while the model runs. It does so as late as it safely can: a request that comes while step t runs is
part of step t+1 then, instead of waiting for that one too. Both give identical outputs.

Everything else that wants something of the core (new requests, aborts, statistics) sends a command,
which is handled between steps. Idle, the thread sleeps on the command queue.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

from headrace_core.engine import EngineStats
from headrace_core.errors import EngineAsleep, EngineDead
from headrace_core.lora import LoRARequest
from headrace_core.request import CoreRequest
from headrace_core.step import ScheduledStep, StepResult
from headrace_engine.core import BETWEEN_STEPS, EngineCore
from headrace_engine.guests import must_not_end
from headrace_engine.messages import CoreOutput, CoreOutputs, TimedStep
from headrace_engine.threads import in_this_context
from headrace_engine.weights.updates import JOIN, UPDATE, comes_by_broadcast

logger = logging.getLogger(__name__)

OVERLAP_DEPTH = 2
"""Steps that the executor holds at once in the overlapped loop: one runs, one waits."""
IDLE_WAIT = 1.0
"""Longest sleep without work, in seconds; only the periodic log line needs it."""
BLOCKED_WAIT = 0.005
"""Sleep when requests wait but none can be scheduled (an external transfer, say)."""
STEP_WAIT = 5.0
"""Seconds of waiting for a step after which the executor's state is looked at."""
JOIN_TIMEOUT = 30.0
"""Longest wait for the running step at shutdown, in seconds."""
MARGIN_SECONDS, MARGIN_SHARE = 0.01, 0.25
"""Least rest of a step when the next one is scheduled: this long, and this share of it."""


class OutputSink(Protocol):
    """The receiver of a core's outputs. Called from a thread of the core; must not block."""

    def on_outputs(self, outputs: CoreOutputs) -> None: ...
    def on_death(self, error: BaseException) -> None: ...


Result = TypeVar("Result")


class _LoopCommand(NamedTuple):
    """Something to do between two steps."""

    run: Callable[[], Any]
    reply: Future[Any] | None = None


_WAKE = _LoopCommand(lambda: None)
"""Makes a waiting loop look around."""


class EngineLoop:
    """Runs an :class:`~headrace_engine.core.EngineCore` in a thread of its own.

    Args:
        core: built; from :meth:`start` on it belongs to the loop's thread.
        sink: gets the outputs of each step at once.
        clock: monotonic seconds.
    """

    def __init__(
        self, core: EngineCore, sink: OutputSink, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._core = core
        self._sink = sink
        self._clock = clock
        self._commands: queue.SimpleQueue[_LoopCommand] = queue.SimpleQueue()
        self._in_flight: deque[tuple[ScheduledStep, Future[StepResult]]] = deque()
        self._pace = StepPace()
        self._timer = core.step_timer
        self._began = clock()
        """Time at which the oldest step in flight began, about."""
        self._told_to_end = self._stopping = False
        self._closed = False
        self._idle = False
        self._beat = clock()
        self._lockstep = core.lockstep
        if self._lockstep is not None:
            self._lockstep.when_due(lambda: self._commands.put(_WAKE))
        self._report = StatsReport(core.log_stats_interval, clock)
        self._thread = threading.Thread(
            target=in_this_context(self._run), name="headrace-engine", daemon=True
        )
        self.failure: BaseException | None = None
        """The error that ended the loop, if it was not told to end."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """End after the step that runs and shut the core down. Idempotent.

        Args:
            wait: until it has ended.
        """
        self._told_to_end = True
        self._commands.put(_LoopCommand(self._leave))
        if (
            wait
            and self._thread.ident is not None
            and self._thread is not threading.current_thread()
        ):
            self._thread.join(JOIN_TIMEOUT)

    @property
    def is_alive(self) -> bool:
        """True if the thread runs."""
        return self._thread.is_alive()

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the loop last came round; 0 while it has nothing to do."""
        return 0.0 if self._idle else max(0.0, self._clock() - self._beat)

    def add(self, requests: Sequence[CoreRequest]) -> None:
        """Queue requests; one that the scheduler refuses ends with reason ``error``."""
        self._commands.put(_LoopCommand(lambda: self._add(requests)))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with reason ``abort``; unknown ids are ignored."""
        self._commands.put(_LoopCommand(lambda: self._emit(self._core.abort(request_ids))))

    def suspend(self, request_ids: Sequence[str]) -> None:
        """Compute nothing of these requests until :meth:`resume`; unknown ids are ignored."""
        self._commands.put(_LoopCommand(lambda: self._core.suspend(request_ids)))

    def resume(self, request_ids: Sequence[str]) -> None:
        """Go on with suspended requests; other ids are ignored."""
        self._commands.put(_LoopCommand(lambda: self._core.resume(request_ids)))

    def stats(self, drain: bool = False) -> Future[EngineStats]:
        """Statistics as of the next pause between steps."""
        return self._call(lambda: self._core.stats(drain))

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> Future[bool]:
        """Empty the prefix cache at the next pause between steps."""
        return self._call(lambda: self._reset_prefix_cache(reset_running_requests))

    def add_lora(self, request: LoRARequest) -> Future[bool]:
        """Have an adapter read, beside the steps; see :meth:`EngineCore.add_lora`."""
        return self._call_through(lambda: self._core.add_lora(request))

    def remove_lora(self, lora_int_id: int) -> Future[bool]:
        """Take no further requests with an adapter; see :meth:`EngineCore.remove_lora`."""
        return self._call_through(lambda: self._core.remove_lora(lora_int_id))

    def list_loras(self) -> Future[tuple[LoRARequest, ...]]:
        """Adapters that are known."""
        return self._call(self._core.list_loras)

    def call_workers(self, method: str, args: Sequence[Any] = ()) -> Future[list[Any]]:
        """Run a listed method of every worker at the next pause between steps."""
        if method == "swap_weights" and len(args) == 1:
            return self._call_through(lambda: self._core.swap_weights(args[0]))
        if method == JOIN:
            return self._call_through(lambda: self._core.call_beside(method, args))
        if method == UPDATE and comes_by_broadcast(args):
            received = self._call_through(lambda: self._core.call_beside(method, args))
            return _followed(received, lambda: self._call(lambda: self._call_workers(method, args)))
        return self._call(lambda: self._call_workers(method, args))

    def apply_model(self, function: Callable[[Any], Any]) -> Future[list[Any]]:
        """Run a function on every worker's model at the next pause between steps."""
        return self._call(lambda: self._core.apply_model(function))

    def run_on_workers(
        self, function: Callable[..., Any], args: Sequence[Any] = ()
    ) -> Future[list[Any]]:
        """Run a function with each worker at the next pause between steps."""
        return self._call(lambda: self._core.run_on_workers(function, args))

    def _call(self, function: Callable[[], Result]) -> Future[Result]:
        reply: Future[Result] = Future()
        self._commands.put(_LoopCommand(function, reply))
        if self._closed:
            self._refuse_commands()
        return reply

    def _call_through(self, function: Callable[[], Future[Result]]) -> Future[Result]:
        """The result of a call whose answer comes later than the call."""
        reply: Future[Result] = Future()

        def pass_on(called: Future[Any]) -> None:
            error = called.exception()
            if error is not None:
                reply.set_exception(error)
                return
            result = called.result(0)
            if isinstance(result, Future):
                result.add_done_callback(pass_on)
            else:
                reply.set_result(result)

        self._call(function).add_done_callback(pass_on)
        return reply

    # The loop's thread, from here on.

    def _run(self) -> None:
        step = self._overlapped_step if self._core.overlapped else self._simple_step
        try:
            while True:
                self._beat = self._clock()
                self._handle_commands()
                if self._stopping:
                    if self._lockstep is not None:
                        self._lockstep.leave()
                    break
                if self._core.executor.failure is not None:  # while nothing ran
                    raise self._core.executor.failure
                if self._core.swap.is_under_way:
                    self._advance_swap()
                self._add(self._core.ready(), again=True)
                has_run = step() or self._take_part()
                self._core.publish_events()
                if not has_run:
                    self._wait_for_commands()
                self._report.maybe_log(self._core)
        except BaseException as error:
            if self._told_to_end and self._lockstep is not None:
                logger.info("another engine ended first: %s", error)
                return
            logger.critical("engine loop died: %s", error, exc_info=True)
            self.failure = _as_dead(error)
        finally:
            self._close()

    def _take_part(self) -> bool:
        """Nothing was to be run: an empty pass, if other engines run one. False if they do not."""
        return self._lockstep is not None and self._lockstep.take_part()

    def _simple_step(self) -> bool:
        """One step from schedule to outputs. False if there was nothing to run."""
        step = self._schedule()
        if step is None:
            return False
        self._finish(step, self._core.execute(step))
        return True

    def _overlapped_step(self) -> bool:
        """Schedule the next step towards the end of the one that runs, then finish that one."""
        if not self._in_flight and not self._launch():
            return False
        stages = self._core.steps_beside
        if stages > 1:
            self._launch_beside(stages)
        if len(self._in_flight) < max(OVERLAP_DEPTH, stages):
            self._listen(*self._in_flight[0])
            self._launch_beside(stages) if stages > 1 else self._launch()
        if self._in_flight:  # a command may have finished everything
            self._finish(*self._in_flight.popleft())
        return True

    def _launch_beside(self, stages: int) -> None:
        """Have every stage compute, as far as there is something to run."""
        while len(self._in_flight) < stages and self._launch():
            pass

    def _launch(self) -> bool:
        """Schedule a step and hand it to the executor; False if there is nothing to run now."""
        step = self._schedule()
        if step is None:
            return False
        if not self._in_flight:
            self._began = self._clock()
        self._in_flight.append((step, self._core.execute(step)))
        return True

    def _schedule(self) -> ScheduledStep | None:
        """The next step; requests that ended on the way are told."""
        schedule, timer = self._core.schedule, self._timer
        step = schedule() if timer is None else timer.schedule(schedule)
        self._emit(self._core.take_refused())
        return step

    def _listen(self, step: ScheduledStep, future: Future[StepResult]) -> None:
        """Handle commands until little of the running step is left, or it has ended after all."""
        deadline = self._began + self._pace.spare(step)
        if deadline <= self._clock():
            return
        future.add_done_callback(lambda _: self._commands.put(_WAKE))
        while not (future.done() or self._stopping) and (left := deadline - self._clock()) > 0:
            self._handle_commands(left)

    def _finish(self, step: ScheduledStep, future: Future[StepResult]) -> None:
        """Wait for a step and pass on what it did; one that raised ends the request to blame."""
        try:
            result = self._wait_for(future)
        except Exception as error:
            failure = self._core.executor.failure
            if failure is not None:
                raise failure from error
            logger.exception("step %d failed", step.step_id)
            if self._timer is not None:
                self._timer.forget(step)
            self._emit(self._core.fail(step, f"{type(error).__name__}: {error}"))
            return
        self._began = self._clock()  # of the step behind it, if there is one
        self._pace.record(step, result.forward_seconds)
        if self._timer is None:
            self._emit(self._core.update(step, result))
        else:
            self._emit(*self._timer.update(self._core.update, step, result))

    def _wait_for(self, future: Future[StepResult]) -> StepResult:
        """The step's result; an executor that fails without ending its steps is noticed too."""
        while True:
            try:
                return future.result(STEP_WAIT)
            except TimeoutError:
                if future.done():  # just now, or the step itself raised this
                    return future.result(0)
                if self._core.executor.failure is not None:
                    raise self._core.executor.failure from None

    def _emit(self, outputs: list[CoreOutput], timed: TimedStep | None = None) -> None:
        if outputs or timed is not None:
            weights = self._core.weights
            earlier = weights.take_earlier(outputs) if weights.has_changed_beside else None
            step = CoreOutputs(outputs, self._clock(), timed, weights.current, earlier)
            self._sink.on_outputs(step)

    def _add(self, requests: Sequence[CoreRequest], *, again: bool = False) -> None:
        for request in requests:
            try:
                self._core.add(request, again=again)
            except EngineAsleep as error:
                self._emit([CoreOutput(request.request_id, finish_reason="error", error=str(error),
                                       asleep=True)])  # fmt: skip
            except Exception as error:
                logger.exception("request %s refused by the scheduler", request.request_id)
                self._emit([_error_output(request.request_id, error)])

    def _reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        self._finish_all()
        return self._core.reset_prefix_cache(reset_running_requests)

    def _call_workers(self, method: str, args: Sequence[Any]) -> list[Any]:
        if method in self._core.extension_calls:
            return self._uncounted(lambda: self._core.call_workers(method, args))
        if method not in BETWEEN_STEPS:
            return self._core.call_workers(method, args)
        self._finish_all()
        return self._uncounted(lambda: self._core.call_workers(method, args))

    def _uncounted(self, call: Callable[[], Result]) -> Result:
        """Run what takes its time, and is no sign of being stuck: reading weights, a user's own code."""
        self._idle = True
        try:
            return call()
        finally:
            self._beat = self._clock()
            self._idle = False

    def _advance_swap(self) -> None:
        self._idle = True  # as in :meth:`_call_workers`
        try:
            self._core.swap.advance()
        finally:
            self._beat = self._clock()
            self._idle = False

    def _finish_all(self) -> None:
        """Wait for the steps in flight."""
        while self._in_flight:
            self._finish(*self._in_flight.popleft())

    def _leave(self) -> None:
        self._stopping = True

    def _handle_commands(self, wait: float = 0.0) -> None:
        """Run all commands that are there, waiting for the first so many seconds."""
        command = self._next_command(wait)
        while command is not None:
            self._handle(command)
            command = self._next_command(0.0)

    def _next_command(self, wait: float) -> _LoopCommand | None:
        try:
            return self._commands.get(block=wait > 0, timeout=wait)
        except queue.Empty:
            return None

    def _handle(self, command: _LoopCommand) -> None:
        """Run one command. What it raises goes to who asked, or else is fatal; it is fatal too if it
        ended a worker."""
        if command.reply is None:
            command.run()
        elif command.reply.set_running_or_notify_cancel():
            try:
                command.reply.set_result(command.run())
            except BaseException as error:
                ours = isinstance(error, Exception)
                command.reply.set_exception(error if ours else must_not_end("the call", error))
                if self._core.executor.failure is not None:
                    raise

    def _wait_for_commands(self) -> None:
        blocked = not self._core.is_idle
        self._idle = not blocked
        try:
            self._handle_commands(BLOCKED_WAIT if blocked else IDLE_WAIT)
        finally:
            self._beat = self._clock()
            self._idle = False

    def _close(self) -> None:
        """Free everything, then tell everyone who still waits."""
        try:
            self._core.shutdown()
        except Exception:
            logger.exception("shutting the core down failed")
        self._in_flight.clear()
        self._closed = True
        self._refuse_commands()
        if self.failure is not None:
            self._sink.on_death(self.failure)

    def _refuse_commands(self) -> None:
        while (command := self._next_command(0.0)) is not None:
            if command.reply is not None and command.reply.set_running_or_notify_cancel():
                command.reply.set_exception(self.failure or EngineDead("the engine is shut down"))


class StatsReport:
    """The periodic log line: throughput since the last one, and what runs now.

    Args:
        interval: seconds between lines; 0 = none.
        clock: monotonic seconds.
    """

    def __init__(self, interval: float, clock: Callable[[], float]) -> None:
        self._interval = interval
        self._clock = clock
        self._last_time = clock()
        self._last = EngineStats()

    def maybe_log(self, core: EngineCore) -> None:
        """Log if the interval is over and anything happened in it."""
        now = self._clock()
        seconds = now - self._last_time
        if not self._interval or seconds < self._interval:
            return
        stats = core.stats()
        if stats.num_steps != self._last.num_steps or stats.num_requests_waiting:
            logger.info("%s", describe_stats(self._last, stats, seconds))
        self._last, self._last_time = stats, now


def describe_stats(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """One line for people: rates between two snapshots, gauges of the later one."""
    queries = now.prefix_cache_queries - before.prefix_cache_queries
    hits = now.prefix_cache_hits - before.prefix_cache_hits
    return (
        f"prompt {(now.prompt_tokens - before.prompt_tokens) / seconds:.1f} tokens/s, "
        f"generation {(now.generation_tokens - before.generation_tokens) / seconds:.1f} tokens/s, "
        f"running {now.num_requests_running}, waiting {now.num_requests_waiting}, "
        f"KV cache {now.kv_cache_usage:.1%}, "
        f"prefix hits {hits / queries if queries else 0.0:.1%}"
    )


def _followed(first: Future[Any], then: Callable[[], Future[Result]]) -> Future[Result]:
    """The result of a second call, which is made once the first has its result."""
    reply: Future[Result] = Future()
    reply.set_running_or_notify_cancel()

    def end(second: Future[Result]) -> None:
        if (error := second.exception()) is not None:
            reply.set_exception(error)
        else:
            reply.set_result(second.result(0))

    def go_on(ended: Future[Any]) -> None:
        if (error := ended.exception()) is not None:
            reply.set_exception(error)
        else:
            then().add_done_callback(end)

    first.add_done_callback(go_on)
    return reply


def _error_output(request_id: str, error: Exception) -> CoreOutput:
    return CoreOutput(request_id, finish_reason="error", error=f"{type(error).__name__}: {error}")


def _as_dead(error: BaseException) -> EngineDead:
    if isinstance(error, EngineDead):
        return error
    dead = EngineDead(f"the engine stopped: {type(error).__name__}: {error}")
    dead.__cause__ = error
    return dead


class StepPace:
    """Forecast of a step's time, judged by the last ones of its kind.

    Two kinds: steps in which every request computes one token, whose time hardly depends on how many they
    are, and steps with prompts, whose time grows with their tokens.
    """

    def __init__(self) -> None:
        self._decoding = 0.0
        self._per_token = 0.0

    def record(self, step: ScheduledStep, seconds: float) -> None:
        """A step took so long. One without requests says nothing of the others."""
        if not step.num_tokens:
            return
        if _decodes(step):
            self._decoding = seconds
        else:
            self._per_token = seconds / step.num_tokens

    def expected(self, step: ScheduledStep) -> float:
        """Seconds; 0 before the first step of its kind."""
        return self._decoding if _decodes(step) else self._per_token * step.num_tokens

    def spare(self, step: ScheduledStep) -> float:
        """Seconds of a step in which the next one need not be scheduled yet."""
        expected = self.expected(step)
        return max(0.0, expected - max(MARGIN_SECONDS, MARGIN_SHARE * expected))


def _decodes(step: ScheduledStep) -> bool:
    return step.num_tokens == len(step.num_scheduled_tokens)
