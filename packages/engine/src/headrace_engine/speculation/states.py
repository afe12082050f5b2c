"""Hidden states of a worker's steps, for a proposer that reads them.

A step gives them for all of its rows, not only for those whose logits are wanted, so logits are computed
behind it: that is the step that is captured, too. Without such a proposer nothing of this happens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.errors import UnsupportedFeature
from headrace_core.model import CausalLM
from headrace_core.speculation import ReadsStates, ShowsStreams, StepStates
from headrace_engine.execution.inputs import StepInputs
from headrace_engine.execution.requests import RequestTable


class StateTap:
    """Takes a model's hidden states out of its steps.

    Args:
        proposer: reads them.
        model: whose they are.
        table: the worker's requests.

    Raises:
        UnsupportedFeature: the model does not show the streams that the proposer wants.
    """

    def __init__(self, proposer: ReadsStates, model: CausalLM, table: RequestTable) -> None:
        self._streams = tuple(proposer.streams)
        shown = model.num_streams if isinstance(model, ShowsStreams) else 0
        if any(not 0 <= stream < shown for stream in self._streams):
            raise UnsupportedFeature(
                f"speculative_config.method: reads the streams {list(self._streams)}: "
                f"{type(model).__name__} shows {f'0 to {shown - 1}' if shown else 'none'}",
                param="speculative_config",
            )
        self._proposer, self._model, self._table = proposer, model, table
        self._parts: list[Tensor] = []

    def forward(self, batch: ForwardBatch) -> Tensor:
        """States of all rows side by side [T, H * (1 + number of streams)]."""
        batch = dataclasses.replace(batch, logits_rows=None)
        if not self._streams:
            return self._model.forward(batch)
        model = cast("ShowsStreams", self._model)
        hidden, streams = model.forward_streams(batch, self._streams)
        return torch.cat([hidden, *streams], dim=-1)

    def take(self, states: Tensor, rows: Tensor | None) -> Tensor:
        """Keep the result of :meth:`forward` until :meth:`tell`.

        Args:
            rows: [R] int64; None: all.

        Returns:
            Those rows of what the model's ``forward`` gives, [R, H].
        """
        self._parts = list(states.chunk(1 + len(self._streams), dim=-1))
        hidden = self._parts[0]
        return hidden.contiguous() if rows is None else hidden[rows]

    def tell(self, inputs: StepInputs) -> None:
        """Tell the proposer of a step whose tokens are in the table."""
        hidden, *streams = self._parts
        self._parts = []
        of_tokens, table = inputs.token_rows, self._table
        starts = np.flatnonzero(np.diff(of_tokens, prepend=-1))
        counts = np.diff(starts, append=len(of_tokens))
        first = inputs.seq_lens - counts
        right = np.clip(table.num_computed_tokens[inputs.rows] - first, 0, counts)
        self._proposer.observe(
            StepStates(
                inputs.request_ids, starts, right, first, hidden, cast(Sequence[Tensor], streams)
            )
        )
