"""Steps of an engine that only encodes media for others: towers run, the language model does not."""

from __future__ import annotations

import time

import numpy as np
import torch

from headrace_core.reliability import failpoints
from headrace_core.step import RequestStepResult, ScheduledStep, StepResult
from headrace_engine.execution.runner import ModelRunner, pass_failpoint

END = 0
"""The token that a complete prompt gets: any, as its request ends with it."""


class EncodingRunner(ModelRunner):
    """See :class:`ModelRunner` for its arguments. A request ends when its prompt has been walked through,
    and with it its media."""

    @torch.inference_mode()
    def execute(self, step: ScheduledStep) -> StepResult:
        """Have the media embedded that a step reaches, and end the requests that are complete."""
        if failpoints.PLAN is not None:
            pass_failpoint("engine.step.prepare", step)
        self.apply_changes(step)
        start = time.perf_counter()
        if self.inputs.media.to_embed:
            self._embed_media(step)
        results = {
            request_id: self._walked(request_id, count)
            for request_id, count in step.num_scheduled_tokens.items()
        }
        return StepResult(step.step_id, results, forward_seconds=time.perf_counter() - start)

    def _walked(self, request_id: str, count: int) -> RequestStepResult:
        """A request's result after so many further tokens."""
        row = self.requests.row_of.get(request_id)
        if row is None:
            return RequestStepResult()
        if row in self.requests.failures:
            return RequestStepResult(error=self.requests.failures[row])
        done = int(self.requests.num_computed_tokens[row]) + count
        self.requests.num_computed_tokens[row] = done
        self.inputs.prompts.spans.pop(row, None)  # nothing reads the vectors here
        if done < int(self.requests.num_tokens[row]):
            return RequestStepResult()
        self.requests.append_tokens(np.array([row]), np.array([END]))
        return RequestStepResult([END])
