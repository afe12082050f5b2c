"""Steps of a model of which other stages have layers: one begins while others are on their way."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.errors import CaptureRefused
from headrace_core.graph import Step, StepGraph
from headrace_core.model import LaunchesPasses, RunsParts
from headrace_core.reliability import failpoints
from headrace_core.step import ScheduledStep, StepResult
from headrace_engine.execution.graph_around import GraphAround
from headrace_engine.execution.inputs import StepInputs
from headrace_engine.execution.runner import ModelRunner, PreparedStep, pass_failpoint

Pass = Future[Callable[[], Tensor]]


class _FirstStage(RunsParts, LaunchesPasses, Protocol):
    """The model, as it is on the first stage."""


class PartGraph(GraphAround):
    """Recorded parts of steps on a stage that hands on all rows, whichever the step's result has.

    Args:
        graph: of steps whose result has a row for each token.
    """

    def fits(self, batch: ForwardBatch, num_logits: int | None = None) -> bool:
        """See :meth:`headrace_core.graph.StepGraph.fits`."""
        return self._graph.fits(_all_rows(batch))

    def replay(self, batch: ForwardBatch, num_logits: int | None = None) -> Tensor:
        """See :meth:`headrace_core.graph.StepGraph.replay`; the result is of no use here."""
        return self._graph.replay(_all_rows(batch))


def record_part(
    record: Callable[..., StepGraph | None], step: Step, *, is_last: bool, **need: Any
) -> StepGraph | None:
    """A graph of a stage's part of steps; None: they run eagerly.

    Args:
        record: makes a graph of a step.
        is_last: the stage's part ends with the rows that the step's result has.
    """
    if is_last:
        return record(step, **need)
    graph = record(step, **{**need, "all_rows": True})
    return None if graph is None else PartGraph(graph)


def _all_rows(batch: ForwardBatch) -> ForwardBatch:
    return dataclasses.replace(batch, logits_rows=None)


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
        states = self._begin_replay(inputs.batch)
        if states is None:
            states = self._stage.launch(self.with_metadata(inputs.batch))
        self._count_computed(inputs)  # the next step may have more of a prompt
        # What is known already: requests of which nothing is computed.
        result = StepResult(step.step_id, dict(prepared.results), arrival=states)
        result.remaining = partial(self._finish, prepared, states, result, begin)
        self._under_way.append((frozenset(step.num_scheduled_tokens), result))
        return result

    def _begin_replay(self, batch: ForwardBatch) -> Pass | None:
        """Begin a step by its recording; None: it must run eagerly."""
        graph = self.fitting_graph
        if graph is None or not graph.fits(batch):
            return None
        graph.replay(batch)
        rows = batch.input_ids if batch.logits_rows is None else batch.logits_rows
        return self._stage.expect(rows.shape[0])

    def _replay(self, inputs: StepInputs, batch: ForwardBatch) -> Tensor | None:
        """See :meth:`ModelRunner._replay`; of steps that wait for their result."""
        if self.tap is not None or inputs.prompt_rows:
            return None
        states = self._begin_replay(batch)
        return None if states is None else self._with_logits(inputs, states.result()())[1]

    def record(self, record: Callable[..., StepGraph | None], **need: Any) -> StepGraph | None:
        """See :meth:`ModelRunner.record`."""
        return record_part(record, self.whole_step, is_last=False, **need)

    def whole_step(self, batch: ForwardBatch) -> Tensor:
        """This stage's part of a step."""
        if self.tap is not None:
            raise CaptureRefused("states between layers of several stages are read")
        return self._stage.run_part(self.with_metadata(batch))

    @property
    def _stage(self) -> _FirstStage:
        return cast("_FirstStage", self.model)

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
