"""Batch-level logits processors: users' code that changes logits before a token is chosen.

A processor sees every step's logits of the whole batch, [num_requests, vocabulary], and keeps its own
state by slot: the row of a request in that tensor. A :class:`BatchUpdate` says which requests come, go
and move between two steps.

Nothing here needs torch until a processor is given tensors.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from headrace_core.sampling.params import SamplingParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace_core.config import PluginSettings

GROUP = "headrace.logits_processors"
"""Entry-point group; what is installed there is always loaded."""


class MoveDirectionality(enum.Enum):
    """Direction of a move between two slots."""

    UNIDIRECTIONAL = "unidirectional"
    """The first slot's request goes to the second; the first is empty afterwards."""
    SWAP = "swap"
    """Both requests change places."""


AddedRequest = tuple[int, SamplingParams, "list[int] | None", list[int]]
"""(slot, parameters, prompt token ids, output token ids).

The prompt's ids are None if it came as embeddings. The output's ids are a live list: the engine
appends each token that it samples, so a processor that keeps the list always sees the output so
far. Only the engine may change it.
"""
MovedRequest = tuple[int, int, MoveDirectionality]
"""(from slot, to slot, kind)."""


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """Changes of a step's batch since the step before.

    To be applied in the order removed, added, moved; moves in the order of their list. The slot of
    an added request is the one at the time of adding, before any move. Adding to an occupied slot
    replaces who was there; so does a one-way move.
    """

    batch_size: int
    """Requests after the update: rows of the logits that the step's ``apply`` gets."""
    removed: Sequence[int] = ()
    """Slots whose requests have gone and which no added request took over."""
    added: Sequence[AddedRequest] = ()
    moved: Sequence[MovedRequest] = ()


class LogitsProcessor(ABC):
    """A rule that changes logits of a batch. Used from one thread, that of the engine's steps."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check what the processor reads of a request, usually ``sampling_params.extra_args``.

        Called when a request is taken in, also in a process that runs no model.

        Raises:
            ValueError: the request is refused with this message (HTTP 400).
        """
        return None

    @abstractmethod
    def __init__(self, config: PluginSettings, device: torch.device, is_pin_memory: bool) -> None:
        """Made once per worker, with positional arguments (name them as you like).

        Args:
            config: the engine's, resolved.
            device: where the logits are.
            is_pin_memory: whether copies to the device profit from pinned memory.
        """
        raise NotImplementedError

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True if the largest logit of a row always stays the largest.

        Asked once, after construction. Such a processor is left out of steps in which all requests
        are greedy, and works after the temperature and ``min_p``; any other works before them.
        """
        raise NotImplementedError

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Take over how the batch has changed; None: it has not. Called before every ``apply``."""
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Change logits [batch_size, vocabulary], float32, in place or in a new tensor.

        Rows of requests that do not use the processor must stay as they are. A row whose request
        gets no token in this step holds zeros; what becomes of it is ignored.
        """
        raise NotImplementedError


State = TypeVar("State")


def process_dict_updates(
    states: dict[int, State],
    update: BatchUpdate | None,
    make_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None],
) -> bool:
    """Keep a sparse mapping from slots to states in step with the batch.

    Args:
        states: changed in place.
        update: as :meth:`LogitsProcessor.update_state` gets it.
        make_state: makes an added request's state from (parameters, prompt ids, output ids); None:
            the request does not use the processor.

    Returns:
        Whether ``states`` has changed.
    """
    if update is None:
        return False
    changed = False
    for slot in update.removed:
        changed |= states.pop(slot, None) is not None
    for slot, params, prompt_ids, output_ids in update.added:
        state = make_state(params, prompt_ids, output_ids)
        changed |= states.pop(slot, None) is not None or state is not None
        if state is not None:
            states[slot] = state
    for source, target, kind in update.moved:
        first, second = states.pop(source, None), states.pop(target, None)
        if first is not None:
            states[target] = first
        if second is not None and kind is MoveDirectionality.SWAP:
            states[source] = second
        changed |= first is not None or second is not None
    return changed
