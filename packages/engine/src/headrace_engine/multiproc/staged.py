"""Steps of a model of which other stages have layers: one begins while others are on their way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from headrace_core.model import LaunchesPasses
from headrace_core.reliability import failpoints
from headrace_core.step import ScheduledStep, StepResult
from headrace_engine.execution.runner import ModelRunner, PreparedStep, pass_failpoint

Pass = Future[Callable[[], Tensor]]


class StagedRunner(ModelRunner):
    """Launches a step's pass and returns at once; the step is completed when its hidden states have come.

    Steps under way have no request in common that would need a token of another one: the scheduler sees to
    that. A step that takes a request away which is under way, or that needs more than a pass, waits until
    all others are complete.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._under_way: deque[tuple[frozenset[str], StepResult]] = deque()
        """Steps that are not complete, with their requests, in order."""

    @torch.inference_mode()
    def execute(self, step: ScheduledStep) -> StepResult:
        """See :meth:`ModelRunner.execute`; the result is complete once it is finished."""
        is_plain = self.drafter is None and self.tap is None and not self.alignments.wanted
        gone = step.gone_request_ids
        if not is_plain or any(not ids.isdisjoint(gone) for ids, _ in self._under_way):
            self._complete_all()
        if not is_plain:
            return super().execute(step)
        prepared = self._prepare(step)
        if prepared.inputs.batch is None:
            self._complete_all()
            return self._complete(prepared)
        return self._launch(prepared)

    def _launch(self, prepared: PreparedStep) -> StepResult:
        step, inputs = prepared.step, prepared.inputs
        assert inputs.batch is not None
        self.launching()
        if failpoints.PLAN is not None:
            pass_failpoint("engine.step.forward", step)
        begin = time.perf_counter()
        # Not only once the states have come: another step may have chosen for its logits since.
        self._choose_adapters(inputs, inputs.logits_rows)
        model = cast("LaunchesPasses", self.model)
        states = model.launch(self.with_metadata(inputs.batch))
        self._count_computed(inputs)  # the next step may have more of a prompt
        # What is known already: requests of which nothing is computed.
        result = StepResult(step.step_id, dict(prepared.results), arrival=states)
        result.remaining = partial(self._finish, prepared, states, result, begin)
        self._under_way.append((frozenset(step.num_scheduled_tokens), result))
        return result

    @torch.inference_mode()
    def _finish(
        self, prepared: PreparedStep, states: Pass, result: StepResult, begin: float
    ) -> None:
        """Complete the oldest step."""
        _, oldest = self._under_way.popleft()
        assert oldest is result
        found = self._complete(prepared, states.result())
        result.requests, result.late = found.requests, found.late
        result.forward_seconds = time.perf_counter() - begin

    def _complete_all(self) -> None:
        """Complete the steps that are under way. What one of them raises, it raises when its result is
        passed on."""
        while self._under_way:
            _, result = self._under_way[0]
            try:
                result.finish()
            except Exception as error:
                result.remaining = partial(_raise, error)


def _raise(error: Exception) -> None:
    raise error
