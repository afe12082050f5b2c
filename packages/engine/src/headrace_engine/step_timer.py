"""Times of steps, for spans that tell it of each request (``--collect-detailed-traces``).

The loop has the scheduler timed, and the worker is wrapped to time itself: a step's result waits
for the next step's model, so the time until it arrives says nothing of the worker. What a request's
steps came to is added up where its outputs are (:mod:`headrace_engine.output_processing`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from headrace_core.executor import Worker, WorkerFactory
from headrace_core.output import StepTimes
from headrace_core.step import ScheduledStep, StepResult
from headrace_engine.config import ObservabilityConfig
from headrace_engine.messages import CoreOutput, TimedStep


class StepTimer:
    """Times the scheduler's part of each step. Used by the loop's thread.

    Args:
        forward: pass on the time of the model's pass.
        execute: pass on the worker's time.
        clock: seconds.
    """

    def __init__(
        self, *, forward: bool, execute: bool, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._forward = forward
        self._execute = execute
        self._clock = clock
        self._scheduling: dict[int, float] = {}
        """By step in flight: seconds."""

    @classmethod
    def of(cls, config: ObservabilityConfig) -> StepTimer | None:
        """The timer that the configuration asks for; None if it asks for none."""
        if not config.collect_detailed_traces:
            return None
        return cls(forward=config.collect_forward_time, execute=config.collect_execute_time)

    def schedule(self, schedule: Callable[[], ScheduledStep | None]) -> ScheduledStep | None:
        """Schedule a step; the time counts if there is one."""
        begin = self._clock()
        step = schedule()
        if step is not None:
            self._scheduling[step.step_id] = self._clock() - begin
        return step

    def update(
        self,
        update: Callable[[ScheduledStep, StepResult, dict[str, int]], list[CoreOutput]],
        step: ScheduledStep,
        result: StepResult,
        told: dict[str, int],
    ) -> tuple[list[CoreOutput], TimedStep]:
        """Take in a step's result: its outputs, and what the step took.

        Args:
            told: see :meth:`headrace_engine.core.EngineCore.update`.
        """
        begin = self._clock()
        outputs = update(step, result, told)
        times = StepTimes(
            self._scheduling.pop(step.step_id) + self._clock() - begin,
            result.forward_seconds if self._forward else None,
            result.execute_seconds if self._execute else None,
        )
        return outputs, TimedStep(list(step.num_scheduled_tokens), times)

    def forget(self, step: ScheduledStep) -> None:
        """A step raised: it counts for nobody."""
        self._scheduling.pop(step.step_id)


class TimedWorker:
    """A :class:`headrace_core.executor.Worker` that says how long each step took it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def execute(self, step: ScheduledStep) -> StepResult:
        """See :meth:`headrace_core.executor.Worker.execute`."""
        begin = time.perf_counter()
        result = self._worker.execute(step)
        result.execute_seconds = time.perf_counter() - begin
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)


def timed_workers(make_worker: WorkerFactory, config: ObservabilityConfig) -> WorkerFactory:
    """Makes the same workers, timed if the configuration asks for that."""
    if not config.collect_execute_time:
        return make_worker
    return lambda: cast(Worker, TimedWorker(make_worker()))
