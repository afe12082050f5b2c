"""One worker in one thread of this process."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace_core.errors import EngineDead, UnsupportedFeature
from headrace_core.executor import Executor, Worker, WorkerFactory
from headrace_core.step import ScheduledStep, StepResult
from headrace_engine.threads import in_this_context, lower_priority

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _WorkerTask:
    """Something to do with the worker, and where its outcome goes."""

    future: Future[Any]
    run: Callable[[Worker], Any]
    is_step: bool


_ARRIVED = _WorkerTask(Future(), lambda _: None, is_step=False)
"""Stands in the queue for a step's result that has come from elsewhere."""


class UniProcExecutor(Executor):
    """Runs one worker in a dedicated daemon thread, first in, first out.

    The worker is made, called and closed in that thread only, so device contexts and thread-local
    state are its own. The thread takes part in the process's GIL: a step holds it only while it
    runs Python. While it prepares a step nobody else should want the GIL, so a step's result waits
    until the model runs the next step, if that is queued already.
    """

    def __init__(self, worker_factory: WorkerFactory) -> None:
        super().__init__(worker_factory)
        self._tasks: queue.SimpleQueue[_WorkerTask | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        """Guards ``_closed`` together with the queue: nothing is queued after the end mark."""
        self._closed = False
        self._failure: BaseException | None = None
        self._worker: Worker | None = None
        self._held: deque[tuple[Future[Any], Any]] = deque()
        """Futures and results that are not yet passed on, in the steps' order."""

    def start(self) -> None:
        """Create the worker; raises what its creation raises, with no thread left behind."""
        if self._thread is not None:
            raise RuntimeError("the executor was already started")
        created: Future[None] = Future()
        self._thread = threading.Thread(
            target=in_this_context(partial(self._serve, created)),
            name="headrace-worker",
            daemon=True,
        )
        self._thread.start()
        try:
            created.result()
        except BaseException:
            self.shutdown()
            raise

    def call(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        """Run a worker method, or a function with the worker, after what is queued, and wait.

        Raises:
            EngineDead: the executor is not running.
            BaseException: the method's own; whatever it is, the worker goes on.
        """

        def run(worker: Worker) -> Any:
            if isinstance(method, str):
                return getattr(worker, method)(*args)
            return method(worker, *args)

        return [self._queue(run, is_step=False).result()]

    def call_beside(self, method: str, *args: Any) -> Future[list[Any]]:
        """See :meth:`headrace_core.executor.Executor.call_beside`. The thread is not waited for: a worker
        that is closed meanwhile has its methods end.

        Raises:
            EngineDead: the executor is not running.
        """
        if self._worker is None:
            raise EngineDead("the executor is not running")
        run = getattr(self._worker, method, None)
        if run is None:
            kind = type(self._worker).__name__
            raise UnsupportedFeature(f"{method}: a {kind} cannot do this")
        future: Future[list[Any]] = Future()

        def work() -> None:
            lower_priority()
            try:
                future.set_result([run(*args)])
            except BaseException as error:
                future.set_exception(error)

        name = f"headrace-{method.replace('_', '-')}"
        threading.Thread(target=in_this_context(work), name=name, daemon=True).start()
        return future

    def submit(self, step: ScheduledStep) -> Future[StepResult]:
        """Queue a step.

        Raises:
            EngineDead: the executor is not running.
        """
        return self._queue(lambda worker: worker.execute(step), is_step=True)

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def shutdown(self) -> None:
        """Cancel what is queued, wait for the call that runs, close the worker, end the thread."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._cancel_pending()
                self._tasks.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._join_seconds())

    def _join_seconds(self) -> float | None:
        """Longest wait for the thread at the end; None: as long as it takes."""
        return None

    def _queue(self, run: Callable[[Worker], Any], *, is_step: bool) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._thread is None or self._closed:
                state = "was shut down" if self._closed else "was not started"
                cause = "" if self._failure is None else f": {self._failure}"
                raise EngineDead(
                    f"the executor {state}; it runs no steps{cause}"
                ) from self._failure
            self._tasks.put(_WorkerTask(future, run, is_step))
        return future

    def _cancel_pending(self) -> None:
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                return
            if task is not None and task is not _ARRIVED:
                task.future.cancel()

    def _serve(self, created: Future[None]) -> None:
        """The thread: make the worker, run tasks until the end mark, close the worker."""
        try:
            worker = self.worker_factory()
        except BaseException as error:  # reported by start(), also KeyboardInterrupt and SystemExit
            self._failure = error
            created.set_exception(error)
            return
        worker.when_launching(self._pass_on_arrived)
        self._worker = worker
        created.set_result(None)
        try:
            while (task := self._tasks.get()) is not None:
                if task is _ARRIVED:
                    self._pass_on_arrived()
                else:
                    self._run(task, worker)
                del task  # or it would keep the last step's result alive until the next
        finally:
            self._pass_on()
            self._worker = None
            _close(worker)

    def _run(self, task: _WorkerTask, worker: Worker) -> None:
        if not task.is_step:
            self._pass_on()
        if not task.future.set_running_or_notify_cancel():
            self._pass_on()
            return
        try:
            result = task.run(worker)
        except Exception as error:
            self._pass_on()
            _settle(task.future.set_exception, error)
        except BaseException as error:  # SystemExit and the like
            if task.is_step:
                self._end(error)
            self._pass_on()
            _settle(task.future.set_exception, error)
        else:
            self._pass_on_arrived()
            self._held.append((task.future, result))
            if isinstance(result, StepResult) and result.arrival is not None:
                result.arrival.add_done_callback(lambda _: self._tasks.put(_ARRIVED))
            elif not task.is_step:
                self._pass_on()
            elif self._tasks.empty():
                self._pass_on_arrived()

    def _pass_on_arrived(self) -> None:
        """Give out the results that are held, up to the first that would have to be waited for."""
        while self._held:
            _, result = self._held[0]
            if isinstance(result, StepResult) and _is_on_its_way(result):
                return
            self._pass_on_first()

    def _pass_on(self) -> None:
        """Give out the results that are held."""
        while self._held:
            self._pass_on_first()

    def _pass_on_first(self) -> None:
        future, result = self._held.popleft()
        try:
            if isinstance(result, StepResult):
                result.finish()
        except BaseException as error:
            if not isinstance(error, Exception):
                self._end(error)
            _settle(future.set_exception, error)
        else:
            _settle(future.set_result, result)

    def _end(self, error: BaseException) -> None:
        """This worker is finished: it runs nothing more, and is closed."""
        self._failure = error
        with self._lock:
            self._closed = True
            self._cancel_pending()
            self._tasks.put(None)


def _is_on_its_way(result: StepResult) -> bool:
    """True if finishing the result would wait."""
    arrival = result.arrival
    return result.remaining is not None and arrival is not None and not arrival.done()


def _settle(settle: Callable[[Any], None], outcome: Any) -> None:
    """Give a future its outcome, unless it was failed already: of an executor that has ended."""
    with suppress(InvalidStateError):
        settle(outcome)


def _close(worker: Worker) -> None:
    try:
        worker.close()
    except Exception:
        logger.exception("closing the worker failed")
