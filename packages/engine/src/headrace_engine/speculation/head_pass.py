"""One pass of a head, captured where it fits.

A captured step has no input but its batch, so the states lie in memory of the pass's own, where the recording
reads them; its result has the next states and the head's logits beside each other. What other ranks take part
in is no part of it: tokens are looked up before, logits are computed behind it.

Letters: T rows, R rows with logits, W width of the head, V vocabulary of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

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
        led: methods of the head in which other ranks take part.
    """

    def __init__(
        self,
        head: DraftHead,
        with_metadata: Callable[[ForwardBatch], ForwardBatch],
        vocab_size: int,
        led: Collection[str] = (),
    ) -> None:
        self._head, self._with_metadata = head, with_metadata
        self._vocab_size = vocab_size
        self.has_caches = bool(head.attention_layers())
        self.graph: StepGraph | None = None
        """Runs the passes that fit it; None: all run eagerly."""
        self._looks_up, self._makes_logits = (
            name not in led for name in ("token_vectors", "compute_logits")
        )
        """What is part of captured passes."""
        self._states = self._vectors = torch.zeros(0)

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
            if not self._looks_up:
                size = self._head.token_vectors(torch.zeros(1, dtype=torch.int64)).shape[1]
                self._vectors = like.new_zeros(rows, size)
            self.graph = record(self._step)

    def _step(self, batch: ForwardBatch) -> Tensor:
        """[R, W + logits of the head] (:data:`headrace_core.graph.Step`); [R, W] if logits come behind it."""
        num_tokens = batch.input_ids.shape[0]
        states, batch = self._states[:num_tokens], self._with_metadata(batch)
        if self._looks_up:
            out = self._head.forward(batch, states, 0)
        else:
            out = self._head.forward(batch, states, 0, self._vectors[:num_tokens])
        if not self._makes_logits:
            return out
        return torch.cat([out, self._head.compute_logits(out, 0)], dim=-1)

    def run(
        self, batch: ForwardBatch, states: Tensor, depth: int, num_logits: int
    ) -> tuple[Tensor, Tensor]:
        """Next states [R, W] and logits [R, V] of the first ``num_logits`` of ``batch.logits_rows``.

        Args:
            states: [T, W].
            depth: guesses that were made before.
        """
        graph = self.graph
        if graph is not None and graph.fits(batch, num_logits):
            return self._replay(graph, batch, states, num_logits)
        if self.has_caches:
            batch = self._with_metadata(batch)
        out = self._head.forward(batch, states, depth)[:num_logits]
        if not num_logits:
            return out, out
        return out, self._spread(self._head.compute_logits(out, depth))

    def _replay(
        self, graph: StepGraph, batch: ForwardBatch, states: Tensor, num_logits: int
    ) -> tuple[Tensor, Tensor]:
        head, num_tokens = self._head, states.shape[0]
        self._states[:num_tokens].copy_(states)
        if not self._looks_up:
            self._vectors[:num_tokens].copy_(head.token_vectors(batch.input_ids))
        both = graph.replay(batch, num_logits)
        out = both[:, : head.width].clone()
        if self._makes_logits:
            return out, self._spread(both[:, head.width :].contiguous())
        return out, self._spread(head.compute_logits(out, 0)) if num_logits else out

    def _spread(self, logits: Tensor) -> Tensor:
        """Logits of the head's vocabulary -> of the model's, -inf for tokens that it never guesses."""
        ids = self._head.token_ids
        if ids is None:
            return logits
        whole = logits.new_full((logits.shape[0], self._vocab_size), -torch.inf)
        return whole.index_copy_(1, ids, logits)
