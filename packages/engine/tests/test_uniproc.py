from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from functools import partial

import pytest

from headrace_core import plugins
from headrace_core.errors import EngineDead
from headrace_core.executor import Executor, WorkerFactory
from headrace_core.step import ScheduledStep, StepResult
from headrace_engine.uniproc import UniProcExecutor
from headrace_testing.engine.executors import (
    PATIENCE,
    EchoWorker,
    ExecutorConformance,
    exiting_worker,
    make_step,
)
from headrace_testing.waiting import wait_until


class TestUniProcExecutor(ExecutorConformance):
    def make_executor(self, factory: WorkerFactory) -> Executor:
        return UniProcExecutor(factory)

    def test_the_worker_lives_in_one_thread_of_its_own(
        self, executor: Executor, workers: list[EchoWorker]
    ) -> None:
        executor.call("load")
        executor.submit(make_step(1)).result(PATIENCE)
        executor.shutdown()
        assert len(workers[0].threads) == 1
        assert threading.get_ident() not in workers[0].threads

    def test_a_worker_that_exits_in_a_step_is_the_executor_s_end(
        self, no_new_threads: None
    ) -> None:
        class Exiting(EchoWorker):
            def execute(self, step: ScheduledStep) -> StepResult:
                self.waiting.set()
                assert self.release.wait(PATIENCE)
                raise SystemExit("the worker gives up")

        worker = Exiting()
        executor = UniProcExecutor(lambda: worker)
        executor.start()
        exiting = executor.submit(make_step(1))
        assert worker.waiting.wait(PATIENCE)
        queued = executor.submit(make_step(2))
        worker.release.set()
        with pytest.raises(CancelledError):
            queued.result(PATIENCE)
        with pytest.raises(SystemExit, match="the worker gives up"):
            exiting.result(PATIENCE)
        assert isinstance(executor.failure, SystemExit)
        with pytest.raises(EngineDead) as caught:
            executor.submit(make_step(3))
        assert caught.value.__cause__ is executor.failure
        executor.shutdown()

    def test_a_call_that_exits_fails_alone(self) -> None:
        executor = UniProcExecutor(exiting_worker(lambda: None))
        executor.start()
        with pytest.raises(SystemExit, match="the worker gives up"):
            executor.call("load")
        assert executor.failure is None
        assert executor.submit(make_step(1)).result(PATIENCE).step_id == 1
        executor.shutdown()

    @pytest.mark.parametrize("behind", [(), ("wait",)], ids=["alone", "while-the-next-one-runs"])
    def test_so_is_one_that_exits_when_a_result_is_finished(
        self, behind: tuple[str, ...], no_new_threads: None
    ) -> None:
        class Exiting(EchoWorker):
            def _finish(self, result: StepResult) -> None:
                raise SystemExit("the worker gives up")

        worker = Exiting()
        executor = UniProcExecutor(lambda: worker)
        executor.start()
        executor.submit(make_step(1, "wait"))
        assert worker.waiting.wait(PATIENCE)
        exiting = executor.submit(make_step(2, "later"))
        next_ones = [executor.submit(make_step(3, name)) for name in behind]
        worker.release.set()
        with pytest.raises(SystemExit, match="the worker gives up"):
            exiting.result(PATIENCE)
        assert isinstance(executor.failure, SystemExit)
        assert [future.result(PATIENCE).step_id for future in next_ones] == [3] * len(behind)
        with pytest.raises(EngineDead):
            executor.submit(make_step(4))
        executor.shutdown()
        assert worker.closed == 1

    def test_starting_twice_is_refused(self, executor: Executor) -> None:
        with pytest.raises(RuntimeError, match="already started"):
            executor.start()

    def test_a_close_that_fails_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        class Unclosable(EchoWorker):
            def close(self) -> None:
                raise OSError("stuck")

        executor = UniProcExecutor(Unclosable)
        executor.start()
        executor.shutdown()
        assert "closing the worker failed" in caplog.text

    def test_a_step_s_result_is_not_kept_alive(self, executor: Executor) -> None:
        import gc
        import weakref

        future = executor.submit(make_step(1))
        future.result(PATIENCE)
        executor.call("load")
        gone = weakref.ref(future)
        del future
        gc.collect()
        assert gone() is None


def test_the_entry_point_is_the_class() -> None:
    assert plugins.load("headrace.executors", "uni") is UniProcExecutor


class _Launching(EchoWorker):
    """Steps whose results come when the test lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.arrivals: dict[int, Future[None]] = {}
        self.finished: list[int] = []

    def execute(self, step: ScheduledStep) -> StepResult:
        result = super().execute(step)
        result.arrival = self.arrivals[step.step_id] = Future()
        result.remaining = partial(self._take, step.step_id)
        return result

    def _take(self, step_id: int) -> None:
        self.arrivals[step_id].result(PATIENCE)
        self.finished.append(step_id)


def test_steps_run_while_others_are_on_their_way() -> None:
    worker = _Launching()
    executor = UniProcExecutor(lambda: worker)
    executor.start()
    one, two = executor.submit(make_step(1)), executor.submit(make_step(2))
    wait_until(lambda: len(worker.arrivals) == 2, what="the second step does not begin")
    assert not one.done()
    worker.arrivals[2].set_result(None)
    worker.arrivals[1].set_result(None)
    assert [one.result(PATIENCE).step_id, two.result(PATIENCE).step_id] == [1, 2]
    assert worker.finished == [1, 2]
    three = executor.submit(make_step(3))
    wait_until(lambda: 3 in worker.arrivals, what="the third step does not begin")
    worker.arrivals[3].set_exception(ValueError("lost"))
    with pytest.raises(ValueError, match="lost"):
        three.result(PATIENCE)
    four = executor.submit(make_step(4))
    wait_until(lambda: 4 in worker.arrivals, what="the fourth step does not begin")
    threading.Timer(0, worker.arrivals[4].set_result, (None,)).start()
    executor.call("load")  # which comes behind the step
    assert four.result(0).step_id == 4
    executor.shutdown()
