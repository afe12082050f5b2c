"""One pass of a head, captured where it fits.

A captured step has no input but its batch, so the states lie in memory of the pass's own, where the recording
reads them; its result has the next states and the head's logits beside each other.

Letters: T rows, R rows with logits, W width of the head, V vocabulary of the model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.graph import Step, StepGraph
from headrace_engine.speculation.draft_head import DraftHead

_LEAST_ROWS = 256
"""Of the memory for states: recordings are made with sizes of their own."""


class HeadPass:
    """Runs a head whose caches are bound.

    Args:
        head: the head.
        with_metadata: adds each cache group's attention metadata to a batch.
        vocab_size: V.
    """

    def __init__(
        self,
        head: DraftHead,
        with_metadata: Callable[[ForwardBatch], ForwardBatch],
        vocab_size: int,
    ) -> None:
        self._head, self._with_metadata = head, with_metadata
        self._vocab_size = vocab_size
        self.has_caches = bool(head.attention_layers())
        self.graph: StepGraph | None = None
        """Runs the passes that fit it; None: all run eagerly."""
        self._states = torch.zeros(0)

    def capture(
        self, record: Callable[[Step], StepGraph | None], largest: int, like: Tensor
    ) -> None:
        """Capture passes of a head with caches, which is the same for each guess.

        Args:
            record: makes a graph of a step.
            largest: most rows of a captured step.
            like: of the states' dtype and device.
        """
        if self.has_caches:
            rows = max(largest, _LEAST_ROWS)
            self._states = like.new_zeros(rows, self._head.width)
            self.graph = record(self._step)

    def _step(self, batch: ForwardBatch) -> Tensor:
        """[R, W + logits of the head] (:data:`headrace_core.graph.Step`)."""
        states = self._states[: batch.input_ids.shape[0]]
        out = self._head.forward(self._with_metadata(batch), states, 0)
        return torch.cat([out, self._head.compute_logits(out, 0)], dim=-1)

    def run(
        self, batch: ForwardBatch, states: Tensor, depth: int, num_logits: int
    ) -> tuple[Tensor, Tensor]:
        """Next states [R, W] and logits [R, V] of the first ``num_logits`` of ``batch.logits_rows``.

        Args:
            states: [T, W].
            depth: guesses that were made before.
        """
        graph, width = self.graph, self._head.width
        if graph is not None and graph.fits(batch, num_logits):
            self._states[: states.shape[0]].copy_(states)
            both = graph.replay(batch, num_logits)
            return both[:, :width].clone(), self._spread(both[:, width:].contiguous())
        if self.has_caches:
            batch = self._with_metadata(batch)
        out = self._head.forward(batch, states, depth)[:num_logits]
        if not num_logits:
            return out, out
        return out, self._spread(self._head.compute_logits(out, depth))

    def _spread(self, logits: Tensor) -> Tensor:
        """Logits of the head's vocabulary -> of the model's, -inf for tokens that it never guesses."""
        ids = self._head.token_ids
        if ids is None:
            return logits
        whole = logits.new_full((logits.shape[0], self._vocab_size), -torch.inf)
        return whole.index_copy_(1, ids, logits)
