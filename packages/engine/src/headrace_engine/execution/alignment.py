"""Sequences of which it is asked when each token was said: see :class:`SupportsAlignment`.

Such a request is one step of its own batch: nothing is sampled, the weights are its result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor

from headrace_core.arrays import PackedArray
from headrace_core.batch import ForwardBatch
from headrace_core.model import SupportsAlignment
from headrace_core.speech.model import ALIGN_TASK
from headrace_core.step import NewRequest, RequestStepResult
from headrace_engine.execution.inputs import InputBuilder, StepInputs
from headrace_engine.execution.media import tensors

logger = logging.getLogger(__name__)


class Alignments:
    """The requests of a worker that are to be aligned.

    Args:
        model: aligns, if it can.
        inputs: gathers batches.
        complete: adds encoder states and attention metadata to a batch.
        computed: is told of the inputs that were run.
    """

    def __init__(
        self,
        model: object,
        inputs: InputBuilder,
        complete: Callable[[StepInputs], ForwardBatch],
        computed: Callable[[StepInputs], None],
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._complete = complete
        self._computed = computed
        self.wanted: dict[str, NewRequest] = {}

    def add(self, row: int, new: NewRequest) -> None:
        """A request was taken in."""
        if new.request.pooling is not None and new.request.pooling.task == ALIGN_TASK:
            self.wanted[new.request_id] = new

    def remove(self, row: int, request_id: str) -> None:
        """A request has gone."""
        self.wanted.pop(request_id, None)

    def run(self, scheduled: Mapping[str, int]) -> dict[str, RequestStepResult]:
        """Results of those that are part of a step, by id; failures are their own."""
        found = [(i, n) for i, n in scheduled.items() if i in self.wanted]
        return {request_id: self._result(request_id, count) for request_id, count in found}

    def _result(self, request_id: str, count: int) -> RequestStepResult:
        inputs = self._inputs.build({request_id: count})
        if inputs.errors:
            return RequestStepResult(error=inputs.errors[request_id])
        try:
            weights = self._aligned(self.wanted[request_id], inputs)
        except Exception as error:
            logger.warning("request %s cannot be aligned", request_id, exc_info=True)
            return RequestStepResult(error=f"{type(error).__name__}: {error}")
        values = np.ascontiguousarray(weights.float().cpu().numpy())
        return RequestStepResult(pooled=PackedArray("float32", values.shape, values.tobytes()))

    def _aligned(self, new: NewRequest, inputs: StepInputs) -> Tensor:
        if not isinstance(self._model, SupportsAlignment):
            raise ValueError(f"{type(self._model).__name__} has no align")
        batch = self._complete(inputs)
        if batch.num_tokens != len(new.token_ids) or len(new.request.media) != 1:
            raise ValueError(
                f"{batch.num_tokens} of {len(new.token_ids)} tokens with {len(new.request.media)} items: a "
                "sequence is aligned whole, with the one item that it is about"
            )
        device = batch.input_ids.device
        weights = self._model.align(batch, tensors(new.request.media[0].inputs, device))
        self._computed(inputs)
        return weights
