"""Users' logits processors in a worker: their slots, and their calls between the sampler's steps.

A worker without processors has none of this. With some, a request gets a slot in the first step that
samples it, so that prompts which are still being computed take no rows; it keeps the slot, moves
apart, until it is gone. Logits are handed over in slot order and the results put back in the order
of the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace_core.errors import ConfigError, EngineError
from headrace_core.sampling.logits_processor import BatchUpdate, LogitsProcessor
from headrace_core.step import NewRequest
from headrace_engine.config import EngineConfig
from headrace_engine.sampling.slots import SlotTracker, Tracked
from headrace_engine.sampling.state import SamplingBatch

logger = logging.getLogger(__name__)

Slots = npt.NDArray[np.int64]
"""[R]; the slot of each row of a batch."""


def make_processors(
    classes: Sequence[type[LogitsProcessor]], config: EngineConfig, device: torch.device
) -> list[LogitsProcessor]:
    """One object of each class, for one worker.

    Raises:
        ConfigError: a constructor raised.
    """
    made = []
    for cls in classes:
        try:
            made.append(cls(config, device, device.type == "cuda"))
        except Exception as error:
            raise ConfigError(
                f"model.logits_processors: {_name(cls)} could not be made: "
                f"{type(error).__name__}: {error}",
                field="model.logits_processors",
            ) from error
    logger.info("logits processors: %s", ", ".join(map(_name, classes)))
    return made


class ProcessorStage:
    """The processors of one worker. One thread only.

    Args:
        processors: at least one, in the order in which they work.
    """

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = list(processors)
        invariant = [bool(processor.is_argmax_invariant()) for processor in processors]
        self._changing = [p for p, keeps in zip(processors, invariant) if not keeps]
        self._invariant = [p for p, keeps in zip(processors, invariant) if keeps]
        self._slots = SlotTracker()
        self._unsampled: dict[str, NewRequest] = {}
        """Requests that were taken in and have no slot yet."""
        self._outputs: dict[str, list[int]] = {}
        """By request with a slot: the list that processors read, too."""
        self._room: Tensor | None = None

    # What happens to requests.

    def add(self, row: int, new: NewRequest) -> None:
        """A request was taken in."""
        self._unsampled[new.request_id] = new

    def remove(self, row: int, request_id: str) -> None:
        """A request has gone."""
        self._unsampled.pop(request_id, None)
        self._outputs.pop(request_id, None)
        self._slots.remove(request_id)

    def begin_step(self, request_ids: Iterable[str]) -> None:
        """Tell the processors who is in the batch from now on.

        Args:
            request_ids: who gets a token in this step.
        """
        for request_id in request_ids:
            new = self._unsampled.pop(request_id, None)
            if new is not None:
                self._give_slot(new)
        update = self._slots.update()
        failures = [_update(processor, update) for processor in self._processors]
        for failure in filter(None, failures):  # all have been told by now
            raise failure

    def observe(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """Requests' outputs have grown by one token each."""
        for request_id, token_id in zip(request_ids, token_ids):
            output = self._outputs.get(request_id)
            if output is not None:
                output.append(token_id)

    def _give_slot(self, new: NewRequest) -> None:
        request, output = new.request, new.output_token_ids
        self._outputs[new.request_id] = output
        prompt_ids = None if request.prompt_embeds is not None else list(request.prompt_token_ids)
        self._slots.add(Tracked(new.request_id, request.params, prompt_ids, output))

    # What happens to logits.

    def bind(self, batch: SamplingBatch, request_ids: Iterable[str]) -> SamplingBatch:
        """The batch with its processors.

        Args:
            request_ids: of the batch's R rows.
        """
        slots = np.array([self._slots.slot(request_id) for request_id in request_ids], np.int64)
        return replace(batch, processors=BoundStage(self, slots))

    @property
    def has_invariant(self) -> bool:
        """True if any processor works after the temperature."""
        return bool(self._invariant)

    def apply_changing(self, values: Tensor, slots: Slots) -> None:
        """Those that may change the largest logit, on values [R, V] float32, in place."""
        self._apply(self._changing, values, slots)

    def apply_invariant(self, values: Tensor, slots: Slots) -> None:
        """Those that do not."""
        self._apply(self._invariant, values, slots)

    def _apply(
        self,
        processors: Sequence[LogitsProcessor],
        values: Tensor,
        slots: Slots,
    ) -> None:
        if not processors:
            return
        in_order = len(slots) == len(self._slots) and bool((slots[:-1] < slots[1:]).all())
        if in_order:
            result = _run(processors, values)
            if result is not values:
                values.copy_(result)
            return
        index = torch.from_numpy(slots).to(values.device)
        whole = self._zeros(values)
        whole[index] = values
        values.copy_(_run(processors, whole)[index])

    def _zeros(self, like: Tensor) -> Tensor:
        """[slots, V], in memory that the next step overwrites."""
        shape = (len(self._slots), like.shape[1])
        room = self._room
        if room is None or room.shape[0] < shape[0] or room.shape[1] != shape[1]:
            room = self._room = torch.empty(shape, dtype=torch.float32, device=like.device)
        return room[: shape[0]].zero_()


class BoundStage:
    """A stage with the slots of one batch's rows."""

    def __init__(self, stage: ProcessorStage, slots: Slots) -> None:
        self._stage = stage
        self._slots = slots
        self.has_invariant = stage.has_invariant

    def apply_changing(self, values: Tensor) -> None:
        """See :meth:`ProcessorStage.apply_changing`."""
        self._stage.apply_changing(values, self._slots)

    def apply_invariant(self, values: Tensor) -> None:
        """See :meth:`ProcessorStage.apply_invariant`."""
        self._stage.apply_invariant(values, self._slots)


def _run(processors: Sequence[LogitsProcessor], logits: Tensor) -> Tensor:
    for processor in processors:
        shape = logits.shape
        try:
            logits = processor.apply(logits)
            fits = logits.shape == shape and logits.dtype == torch.float32
        except BaseException as error:  # sys.exit, too, would end the worker
            raise _failure(processor, "apply") from error
        if not fits:
            raise EngineError(
                f"logits processor {_name(type(processor))} returned {list(logits.shape)} "
                f"{logits.dtype} for logits {list(shape)} torch.float32"
            )
    return logits


def _update(processor: LogitsProcessor, update: BatchUpdate | None) -> EngineError | None:
    """Tell one processor; what went wrong, if anything did."""
    try:
        processor.update_state(update)
    except BaseException as error:  # sys.exit, too
        failure = _failure(processor, "update_state")
        failure.__cause__ = error
        return failure
    return None


def _failure(processor: LogitsProcessor, method: str) -> EngineError:
    """Named, without the foreign exception's text, which is in the log as the cause."""
    return EngineError(f"logits processor {_name(type(processor))} failed in {method}")


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
