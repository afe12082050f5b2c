"""Conformance suite of executors: a suite to inherit, and scriptable workers to run it with."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from headrace_core.errors import EngineError
from headrace_core.executor import Executor, MemoryProfile, WorkerFactory
from headrace_core.kv import CacheSpec, KVCacheConfig, KVCacheSpec
from headrace_core.step import RequestStepResult, ScheduledStep, StepResult

PATIENCE = 30.0
"""Seconds after which a test gives up waiting; nothing waits that long unless it is broken."""


class EchoWorker:
    """A worker without a model: each request of a step gets its number of tokens back.

    Requests steer it by their ids: ``raise`` fails the step, ``unlaunched`` before its model would
    run; ``wait`` blocks it, the model running, until :attr:`release` is set. The result of ``later`` is
    filled in by ``finish``, which fails the step if it has ``spoilt``.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.steps: list[int] = []
        self.closed = 0
        self.threads: set[int] = {threading.get_ident()}
        self.launching: Callable[[], None] = lambda: None
        self.waiting = threading.Event()
        self.release = threading.Event()

    def load(self) -> None:
        self._note("load")

    def kv_specs(self) -> dict[str, CacheSpec]:
        self._note("kv_specs")
        return {"layer": KVCacheSpec(block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")}

    def profile(self) -> MemoryProfile:
        self._note("profile")
        return MemoryProfile(weights=1, activations=2, available=3)

    def allocate_cache(self, config: KVCacheConfig) -> None:
        self._note(f"allocate_cache {config.pools}")

    def warm_up(self) -> None:
        raise LookupError("warm_up is what this worker cannot do")

    def execute(self, step: ScheduledStep) -> StepResult:
        self._note(f"execute {step.step_id}")
        if "unlaunched" in step.num_scheduled_tokens:
            raise ArithmeticError(f"step {step.step_id}")
        self.launching()
        if "wait" in step.num_scheduled_tokens:
            self.waiting.set()
            assert self.release.wait(PATIENCE)
        if "raise" in step.num_scheduled_tokens:
            raise ArithmeticError(f"step {step.step_id}")
        self.steps.append(step.step_id)
        results = {
            request_id: RequestStepResult(token_ids=[count])
            for request_id, count in step.num_scheduled_tokens.items()
        }
        result = StepResult(step.step_id, results)
        if "later" in results:
            result.remaining = functools.partial(self._finish, result)
        return result

    def _finish(self, result: StepResult) -> None:
        self._note(f"finish {result.step_id}")
        if "spoilt" in result.requests:
            raise ArithmeticError(f"finishing step {result.step_id}")
        result.requests["later"].token_ids = [99]

    def when_launching(self, call: Callable[[], None]) -> None:
        self.launching = call

    def report(self) -> dict[str, Any]:
        self._note("report")
        return {"rank": 0}

    def apply_model(self, function: Callable[[Any], Any]) -> Any:
        self._note("apply_model")
        return function(self)

    def update_config(self, changes: object) -> None:
        self._note("update_config")

    def reload_weights(self) -> None:
        self._note("reload_weights")

    def start_profile(self) -> None:
        self._note("start_profile")

    def stop_profile(self) -> None:
        self._note("stop_profile")

    def close(self) -> None:
        self._note("close")
        self.closed += 1

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.get_ident())


class UnbuildableWorker(EchoWorker):
    """A worker whose creation fails."""

    def __init__(self) -> None:
        raise MemoryError("no room for this worker")


def _note_index(into: list[int], index: int, _: object) -> None:
    into.append(index)


def make_step(step_id: int, *request_ids: str) -> ScheduledStep:
    """A step of one token per request."""
    return ScheduledStep(step_id, dict.fromkeys(request_ids or ("a",), 1))


class ExecutorConformance:
    """Inherit and override :meth:`make_executor`. For executors whose workers share this process's
    memory; one that starts processes overrides :meth:`workers` with proxies."""

    def make_executor(self, factory: WorkerFactory) -> Executor:
        """The executor under test, not started."""
        raise NotImplementedError

    @pytest.fixture
    def workers(self) -> list[EchoWorker]:
        """Workers made so far, by rank."""
        return []

    @pytest.fixture
    def executor(self, workers: list[EchoWorker]) -> Iterator[Executor]:
        def factory() -> EchoWorker:
            workers.append(EchoWorker())
            return workers[-1]

        executor = self.make_executor(factory)
        executor.start()
        yield executor
        for worker in workers:
            worker.release.set()
        executor.shutdown()

    def test_a_step_comes_back(self, executor: Executor) -> None:
        result = executor.submit(ScheduledStep(7, {"a": 3, "b": 1})).result(PATIENCE)
        assert result.step_id == 7
        assert {k: v.token_ids for k, v in result.requests.items()} == {"a": [3], "b": [1]}
        assert executor.failure is None

    def test_a_result_is_there_while_the_next_step_runs(
        self, executor: Executor, workers: list[EchoWorker]
    ) -> None:
        first, second = executor.submit(make_step(1)), executor.submit(make_step(2, "wait"))
        assert first.result(PATIENCE).step_id == 1
        assert not second.done()
        workers[0].release.set()
        assert second.result(PATIENCE).step_id == 2

    @pytest.mark.parametrize("how", ["raise", "unlaunched"])
    def test_results_come_in_order_whatever_fails(self, executor: Executor, how: str) -> None:
        done: list[int] = []
        futures = [executor.submit(make_step(i, how if i % 3 == 1 else "a")) for i in range(9)]
        for index, future in enumerate(futures):
            future.add_done_callback(functools.partial(_note_index, done, index))
        for index, future in enumerate(futures):
            assert (future.exception(PATIENCE) is not None) == (index % 3 == 1)
        assert done == sorted(done)

    def test_a_result_is_finished_before_it_is_passed_on(
        self, executor: Executor, workers: list[EchoWorker]
    ) -> None:
        steps = [make_step(1, "later"), make_step(2, "later", "spoilt"), make_step(3, "later")]
        first, second, third = [executor.submit(step) for step in steps]
        for future in (first, third):
            assert future.result(PATIENCE).requests["later"].token_ids == [99]
        with pytest.raises(ArithmeticError, match="finishing step 2"):
            second.result(PATIENCE)
        assert executor.failure is None
        assert [c for c in workers[0].calls if c.startswith("finish")] == [
            "finish 1", "finish 2", "finish 3"
        ]  # fmt: skip
        assert len(workers[0].threads - {threading.get_ident()}) <= 1

    def test_finishing_does_not_keep_the_next_step_waiting(
        self, executor: Executor, workers: list[EchoWorker]
    ) -> None:
        """The result is there while the next step runs, finished when that was launched."""
        first, second = (
            executor.submit(make_step(1, "later")),
            executor.submit(make_step(2, "wait")),
        )
        assert first.result(PATIENCE).requests["later"].token_ids == [99]
        assert not second.done()
        workers[0].release.set()
        assert second.result(PATIENCE).step_id == 2

    def test_steps_run_in_the_order_of_submission(
        self, executor: Executor, workers: list[EchoWorker]
    ) -> None:
        futures = [executor.submit(make_step(i)) for i in range(50)]
        assert [f.result(PATIENCE).step_id for f in futures] == list(range(50))
        assert workers[0].steps == list(range(50))

    def test_submit_returns_while_a_step_runs(
        self, executor: Executor, workers: list[EchoWorker]
    ) -> None:
        first = executor.submit(make_step(1, "wait"))
        assert workers[0].waiting.wait(PATIENCE)
        second = executor.submit(make_step(2))
        assert not first.done()
        assert not second.done()
        workers[0].release.set()
        assert second.result(PATIENCE).step_id == 2
        assert first.done()

    def test_a_failed_step_fails_only_its_future(self, executor: Executor) -> None:
        before = executor.submit(make_step(1))
        failed = executor.submit(make_step(2, "raise"))
        after = executor.submit(make_step(3))
        assert before.result(PATIENCE).step_id == 1
        with pytest.raises(ArithmeticError, match="step 2"):
            failed.result(PATIENCE)
        assert after.result(PATIENCE).step_id == 3
        assert executor.failure is None

    def test_call_gives_results_by_rank(
        self, executor: Executor, workers: list[EchoWorker]
    ) -> None:
        profiles = executor.call("profile")
        assert profiles == [MemoryProfile(1, 2, 3)] * len(workers)
        assert executor.call("load") == [None] * len(workers)

    def test_call_passes_arguments(self, executor: Executor, workers: list[EchoWorker]) -> None:
        executor.call("allocate_cache", KVCacheConfig(pools=(5,), groups=()))
        assert all(worker.calls == ["allocate_cache (5,)"] for worker in workers)

    def test_call_runs_a_function_with_each_worker(
        self, executor: Executor, workers: list[EchoWorker]
    ) -> None:
        found = executor.call(lambda worker, more: (worker.report()["rank"], more), "more")
        assert found == [(0, "more")] * len(workers)
        assert all(worker.calls == ["report"] for worker in workers)

    def test_call_raises_what_the_worker_raises(self, executor: Executor) -> None:
        with pytest.raises(LookupError, match="warm_up"):
            executor.call("warm_up")
        assert executor.submit(make_step(1)).result(PATIENCE).step_id == 1

    def test_a_call_waits_for_steps_before_it(
        self, executor: Executor, workers: list[EchoWorker]
    ) -> None:
        executor.submit(make_step(1))
        executor.call("load")
        assert workers[0].calls == ["execute 1", "load"]

    def test_start_raises_what_creation_raises(self, no_new_threads: None) -> None:
        executor = self.make_executor(UnbuildableWorker)
        with pytest.raises(MemoryError, match="no room for this worker"):
            executor.start()
        assert isinstance(executor.failure, MemoryError)
        with pytest.raises(EngineError):
            executor.submit(make_step(1))
        executor.shutdown()

    def test_nothing_runs_before_start(self) -> None:
        executor = self.make_executor(EchoWorker)
        with pytest.raises(EngineError):
            executor.submit(make_step(1))
        executor.shutdown()

    def test_shutdown_closes_each_worker_once(
        self, executor: Executor, workers: list[EchoWorker]
    ) -> None:
        executor.submit(make_step(1)).result(PATIENCE)
        executor.shutdown()
        executor.shutdown()
        assert [worker.closed for worker in workers] == [1] * len(workers)
        assert workers[0].calls[-1] == "close"

    def test_shutdown_cancels_what_is_queued(
        self, executor: Executor, workers: list[EchoWorker]
    ) -> None:
        running = executor.submit(make_step(1, "wait"))
        assert workers[0].waiting.wait(PATIENCE)
        queued = [executor.submit(make_step(i)) for i in (2, 3)]
        stopper = threading.Thread(target=executor.shutdown)
        stopper.start()
        for future in queued:
            with pytest.raises(CancelledError):
                future.result(PATIENCE)
        workers[0].release.set()
        stopper.join(PATIENCE)
        assert not stopper.is_alive()
        assert running.result(PATIENCE).step_id == 1
        assert workers[0].steps == [1]

    def test_no_step_is_taken_after_shutdown(self, executor: Executor) -> None:
        executor.shutdown()
        with pytest.raises(EngineError):
            executor.submit(make_step(1))
        with pytest.raises(EngineError):
            executor.call("load")

    def test_a_future_cancelled_in_time_never_runs(
        self, executor: Executor, workers: list[EchoWorker]
    ) -> None:
        executor.submit(make_step(1, "wait"))
        assert workers[0].waiting.wait(PATIENCE)
        dropped = executor.submit(make_step(2))
        assert dropped.cancel()
        workers[0].release.set()
        assert executor.submit(make_step(3)).result(PATIENCE).step_id == 3
        assert workers[0].steps == [1, 3]

    def test_no_thread_is_left_behind(self, no_new_threads: None) -> None:
        executor = self.make_executor(EchoWorker)
        executor.start()
        executor.submit(make_step(1)).result(PATIENCE)
        executor.shutdown()

    @pytest.fixture
    def no_new_threads(self) -> Iterator[None]:
        """Fails the test if it ends with threads that were not there before."""
        before = set(threading.enumerate())
        yield
        left = [thread.name for thread in threading.enumerate() if thread not in before]
        assert not left, f"threads left behind: {left}"


def exiting_worker(release: Callable[[], Any]) -> type[EchoWorker]:
    """A worker class whose ``load`` calls ``release`` and then ends its thread with SystemExit."""

    class ExitingWorker(EchoWorker):
        def load(self) -> None:
            release()
            raise SystemExit("the worker gives up")

    return ExitingWorker
