"""Guesses by a smaller model of the same vocabulary (Leviathan et al. 2023, arXiv:2211.17192).

The draft model's layers have places in the cache, so every request's block tables hold its keys and
values, too; they are computed here, from the tokens that the worker knows. What is behind a wrong guess
is computed again. Long prompts are caught up with in pieces: until then a request has no guesses.

The draft model *draws* its guesses, with the same random numbers as the model will (see
:mod:`~headrace_engine.speculation.verification`): where both expect the same, they draw the same.

Letters: B requests that are guessed for, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.errors import UnsupportedFeature
from headrace_core.graph import StepGraph
from headrace_core.kv import FullAttentionSpec, MLASpec
from headrace_core.model import AttentionLayer, CausalLM, SupportsRecurrence
from headrace_core.speculation import DraftProposer, DraftTask
from headrace_core.step import NewRequest
from headrace_engine.speculation.draft_context import DraftContext, DraftView
from headrace_engine.speculation.draft_head import DraftHead
from headrace_engine.speculation.layer_names import DRAFT_PREFIX

Ints = npt.NDArray[np.int64]

CATCH_UP_TOKENS = 256
"""Tokens of a request that a step computes at most to catch up: others wait meanwhile."""


def draft_layers(model: CausalLM | DraftHead) -> dict[str, AttentionLayer]:
    """A draft model's or head's layers with caches, by names that no layer of the model has.

    Raises:
        UnsupportedFeature: some give up what they saw, or have states: they may be behind the model's.
    """
    if isinstance(model, SupportsRecurrence) and model.state_layers():
        raise _refused("recurrent layers")
    layers = model.attention_layers()
    if any(layer.spec.kv_sharing_target is not None for layer in layers.values()):
        raise _refused("layers that share caches")
    for layer in layers.values():
        if layer.kv_spec is not None and not isinstance(layer.kv_spec, FullAttentionSpec | MLASpec):
            raise _refused("layers with windows, chunks or cross-attention")
    return {f"{DRAFT_PREFIX}{name}": layer for name, layer in layers.items()}


def _refused(what: str) -> UnsupportedFeature:
    return UnsupportedFeature(
        f"speculative_config.model: the draft model has {what}: must be one of full attention",
        param="speculative_config",
    )


class DraftModelProposer(DraftProposer):
    """Guesses by a model whose caches are bound.

    Args:
        model: the draft model; ``context.max_len`` is its longest context: longer requests have no guesses.
        context: of the worker.
    """

    def __init__(self, model: CausalLM, context: DraftContext) -> None:
        self._model = model
        self._max_len = context.max_len
        self._view = DraftView(context.table)
        self._inputs = context.inputs(self._view)
        self._with_metadata = context.with_metadata
        self._sampler = context.sampler
        self.graph: StepGraph | None = None
        """Runs the steps that fit it; None: all run eagerly."""

    # A table of the worker's, as well: see headrace_engine.execution.requests.RowTable.

    def add(self, row: int, new: NewRequest) -> None:
        """Nothing of a new request is computed yet, whatever the model has of it."""
        self._view.grow()
        self._view.num_computed_tokens[row] = 0

    def remove(self, row: int, request_id: str) -> None:
        """A request has gone."""

    def capture(self, record: Callable[..., StepGraph | None], largest: int, like: Tensor) -> None:
        """Capture its steps: ``record`` makes a graph of a step."""
        self.graph = record(self.step, kind="steps of the draft model")

    def step(self, batch: ForwardBatch) -> Tensor:
        """A whole step of the draft model (:data:`headrace_core.graph.Step`)."""
        return self._model.compute_logits(self._model.forward(self._with_metadata(batch)))

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Sequence[int]]:
        """See :class:`headrace_core.speculation.DraftProposer`."""
        view = self._view
        view.grow()
        rows = np.array([view.row_of[task.request_id] for task in tasks], np.int64)
        view.num_guessed[rows] = 0
        known = view.num_tokens[rows]
        room = np.minimum([task.most for task in tasks], self._max_len - known)
        # What lies behind the last token that was right is of wrong guesses.
        view.num_computed_tokens[rows] = np.minimum(view.num_computed_tokens[rows], known - 1)
        caught_up = self._catch_up(tasks, rows, known) & (room > 0)
        guesses: list[list[int]] = [[] for _ in tasks]
        alive = np.flatnonzero(caught_up)
        while alive.size:
            ids = [tasks[r].request_id for r in alive.tolist()]
            chosen = self._guess(ids, rows[alive])
            for r, token in zip(alive.tolist(), chosen.tolist()):
                guesses[r].append(token)
            alive = alive[view.num_guessed[rows[alive]] < room[alive]]
        view.num_guessed[rows] = 0
        return guesses

    def _catch_up(
        self, tasks: Sequence[DraftTask], rows: Ints, known: Ints
    ) -> npt.NDArray[np.bool_]:
        """[B]: True for those that lack only what the first guess computes, once others have come closer."""
        view = self._view
        behind = known - view.num_computed_tokens[rows]
        late = np.flatnonzero(behind > CATCH_UP_TOKENS)
        if late.size:
            counts = {tasks[r].request_id: CATCH_UP_TOKENS for r in late[:1].tolist()}
            self._run(counts, num_logits=0)
            row = rows[late[:1]]
            view.num_computed_tokens[row] += CATCH_UP_TOKENS
        caught_up: npt.NDArray[np.bool_] = behind <= CATCH_UP_TOKENS
        return caught_up

    def _guess(self, ids: list[str], rows: Ints) -> Ints:
        """[B]: the next token of each, which stands behind its others from now on."""
        view = self._view
        ends = view.num_tokens[rows]
        counts = dict(zip(ids, (ends - view.num_computed_tokens[rows]).tolist()))
        logits = self._run(counts, num_logits=len(ids))
        chosen: Ints = self._sampler(logits, view.sampling_batch(rows)).token_ids
        view.num_computed_tokens[rows] = ends
        view.place(rows, ends, chosen)
        view.num_guessed[rows] += 1
        return chosen

    def _run(self, counts: Mapping[str, int], num_logits: int) -> Tensor:
        """Compute so many tokens of requests: the logits behind their last ones [B, V]."""
        batch = self._inputs.build(counts).batch
        assert batch is not None
        graph = self.graph
        if graph is not None and graph.fits(batch, num_logits):
            return graph.replay(batch, num_logits)
        hidden = self._model.forward(self._with_metadata(batch))[:num_logits]
        return self._model.compute_logits(hidden)
