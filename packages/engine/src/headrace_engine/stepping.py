"""Coroutines of :class:`~headrace_engine.front.EngineFront`, run in the calling thread without an event loop.

A coroutine suspends where it waits for requests: :class:`ThreadWaiting` yields what it waits for, and the
:class:`CoroutineStepper` that drives it goes on with it when that is there. Many coroutines run side by
side, in the same steps of the core.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from headrace_core.engine import AdmissionTicket
from headrace_core.errors import GenerateError
from headrace_core.sampling.params import SamplingParams
from headrace_core.speech.model import ALIGN_TASK
from headrace_engine.calls import OfflineCalls, RequestUpdate
from headrace_engine.front import ControlCall
from headrace_engine.input_processing.pooling import PoolingPrompt
from headrace_engine.input_processing.prepared import PreparedRequest
from headrace_engine.structured.admission import Admitted

T = TypeVar("T")

AT_ONCE = 1024
"""Prompts of one call that are under way together; the others are read meanwhile."""


@dataclass(eq=False, slots=True)
class _CoroutineGroup:
    """Coroutines that another one waits for."""

    work: Iterator[tuple[int, Coroutine[Any, Any, Any]]]
    at_once: int
    take: Callable[[int, Any], object]
    num_running: int = 0
    starting: bool = False


@dataclass(eq=False, slots=True)
class _CoroutineTask:
    """A coroutine that is under way, and who gets its result."""

    work: Coroutine[Any, Any, Any]
    done: Callable[[Any], object]


class ThreadWaiting:
    """The :class:`~headrace_engine.front.Waiting` of coroutines that a :class:`CoroutineStepper` runs.
    Nothing is refused for its number, and everything is computed at once.

    Args:
        pooling_ended: is told of each prompt that ends without a result, with the reason ``error`` or
            ``abort``; None: nobody is.
    """

    def __init__(self, pooling_ended: Callable[[str], None] | None = None) -> None:
        self._pooling_ended = pooling_ended

    def arriving(
        self, num_requests: int = 1, ticket: AdmissionTicket | None = None
    ) -> AbstractAsyncContextManager[Callable[[int], Awaitable[None]]]:
        return nullcontext(_admit)

    def share(self, wanted: int | None = None) -> int:
        return AT_ONCE if wanted is None else wanted

    async def read(self, prompt: PoolingPrompt | Sequence[int], work: Callable[[], T]) -> T:
        return work()

    async def compute(self, work: Callable[[], T], size: int | None = None) -> T:
        return work()

    async def admit(self, params: SamplingParams) -> Admitted | None:
        return None

    async def answer(self, call: ControlCall[T]) -> T:
        return call.answer()

    async def begin(self, request: PreparedRequest) -> Any:
        update: RequestUpdate = await _suspend(request)
        pooling = request.pooling
        if (
            update.output is None
            and pooling is not None
            and pooling.task != ALIGN_TASK  # which is part of a transcription
            and self._pooling_ended is not None
        ):
            self._pooling_ended("abort" if update.error is None else "error")
        if update.error is not None:
            raise update.error
        if update.output is None:
            raise GenerateError(f"request {update.request_id!r} was aborted")
        return update.output

    async def together(
        self, work: Iterator[Coroutine[Any, Any, T]], at_once: int, take: Callable[[int, T], object]
    ) -> None:
        await _suspend(_CoroutineGroup(enumerate(work), at_once, take))


async def _admit(num_tokens: int) -> None:
    """Let a request begin."""


@types.coroutine
def _suspend(wanted: PreparedRequest | _CoroutineGroup) -> Generator[Any, Any, Any]:
    """Hand a request, or a group of coroutines, to the stepper; returns when it has ended."""
    return (yield wanted)


def result_at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing.

    Raises: what it raises.
    """
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError("a coroutine waits for requests, and nobody runs them")


class CoroutineStepper:
    """Drives coroutines side by side: their requests run together, in one call. Belongs to one thread.

    The first that raises ends all. Leaving the ``with`` block ends what is left.

    Args:
        calls: run the requests.
    """

    def __init__(self, calls: OfflineCalls) -> None:
        self._call = calls.open()
        self._waiting: dict[str, _CoroutineTask] = {}
        """By request id."""
        self._parents: dict[_CoroutineGroup, _CoroutineTask] = {}
        self.num_running = 0
        """Number of coroutines that were started and have not ended."""

    def start(self, work: Coroutine[Any, Any, T], done: Callable[[T], object]) -> None:
        """Begin a coroutine of the front; ``done`` is called with its result.

        Raises: the refusal of a prompt of the coroutine's.
        """
        self.num_running += 1
        self._go_on(_CoroutineTask(work, partial(self._ended, done)), None)

    def advance(self) -> None:
        """Wait for the core once, and go on with the coroutines whose requests have ended.

        Raises:
            GenerateError: a request failed.
            EngineDead: the engine stopped.
        """
        for update in self._call.wait():
            if update.finished:
                self._go_on(self._waiting.pop(update.request_id), update)

    def finish(self) -> None:
        """Go on until all have ended. Raises: as :meth:`advance`."""
        while self.num_running:
            self.advance()

    def result(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine; others go on meanwhile. Raises: as :meth:`start`, :meth:`advance`."""
        found: list[T] = []
        self.start(work, found.append)
        while not found:
            self.advance()
        return found[0]

    def __enter__(self) -> CoroutineStepper:
        return self

    def __exit__(self, *_: object) -> None:
        left = [*self._waiting.values(), *self._parents.values()]
        self._waiting, self._parents = {}, {}
        with ExitStack() as each:  # one that raises keeps no other from ending
            for task in reversed(left):
                each.callback(task.work.close)
            self._call.close()

    def _ended(self, done: Callable[[T], object], result: T) -> None:
        self.num_running -= 1
        done(result)

    def _go_on(self, task: _CoroutineTask, answer: Any) -> None:
        """Give a coroutine what it waited for, and note what it waits for next."""
        try:
            wanted = task.work.send(answer)
        except StopIteration as end:
            task.done(end.value)
            return
        if isinstance(wanted, _CoroutineGroup):
            self._parents[wanted] = task
            self._fill(wanted)
            return
        try:
            self._call.add(wanted)
        except BaseException:
            task.work.close()
            raise
        self._waiting[wanted.request_id] = task

    def _fill(self, group: _CoroutineGroup) -> None:
        """Start coroutines of a group, as far as there is room; the last to end lets its parent go on."""
        if group.starting:
            return  # one has ended at once: whoever started it starts the next
        group.starting = True
        while group.num_running < group.at_once:
            index, work = next(group.work, (0, None))
            if work is None:
                break
            group.num_running += 1
            self._go_on(_CoroutineTask(work, partial(self._member_ended, group, index)), None)
        group.starting = False
        if not group.num_running:
            self._go_on(self._parents.pop(group), None)

    def _member_ended(self, group: _CoroutineGroup, index: int, result: Any) -> None:
        group.num_running -= 1
        group.take(index, result)
        self._fill(group)
