"""Base of all recurrent layers: a state for each request, in blocks that the runner hands out.

Letters: T tokens, B requests, N blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace_core.kv import RecurrentSpec, StateShape
from headrace_models.layers.base import Layer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


class StateArguments(NamedTuple):
    """Arguments of the ops of :mod:`headrace_core.ops.recurrent` that tell of a state, in their order."""

    state: Tensor | None
    """[N, *shape]; None while memory is profiled."""
    state_in: Tensor | None
    """[B] int64."""
    state_out: Tensor | None
    """[B] int64."""
    cu_seqlens_q: Tensor
    """[B + 1] int32."""


class RecurrentLayer(Layer, ABC):
    """A layer with a state: core's ``StateLayer``.

    Args:
        name: of the module, as the checkpoint spells it.
        states: what the state consists of, per rank once sharded.
    """

    def __init__(self, context: BuildContext, name: str, states: Sequence[StateShape]) -> None:
        self.name = name
        self.kv_spec = RecurrentSpec(context.block_size, tuple(states))
        self.group = 0
        self.states: tuple[Tensor, ...] | None = None

    def bind_states(self, states: Sequence[Tensor] | None, group: int) -> None:
        """See :meth:`headrace_core.model.StateLayer.bind_states`."""
        self.states, self.group = None if states is None else tuple(states), group

    @abstractmethod
    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""

    def state(self, index: int, batch: ForwardBatch) -> StateArguments:
        """Arguments of the op that uses the state's tensor ``index``."""
        if self.states is None or not batch.groups:  # memory is being profiled
            return StateArguments(None, None, None, batch.cu_seqlens_q)
        own = batch.groups[self.group]
        return StateArguments(self.states[index], own.state_in, own.state_out, batch.cu_seqlens_q)
