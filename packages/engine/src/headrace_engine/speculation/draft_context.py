"""A worker, as a model or head that guesses for it sees it.

Letters: B requests that are guessed for, C rows of the worker's table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace_core.batch import ForwardBatch
from headrace_engine.execution.inputs import InputBuilder
from headrace_engine.execution.requests import RequestTable
from headrace_engine.sampling.sampler import Sampler
from headrace_engine.sampling.state import NOT_WANTED, SamplingBatch

Ints = npt.NDArray[np.int64]


class DraftView:
    """A worker's requests, as far as the draft model has come with them: a
    :class:`~headrace_engine.execution.requests.RequestTable` with other counts.

    Args:
        table: the worker's.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self.num_computed_tokens = np.zeros(len(table.num_tokens), np.int64)
        """[C]; tokens whose keys and values the draft model has."""
        self.num_guessed = np.zeros(len(table.num_tokens), np.int64)
        """[C]; guesses of this step that stand behind the known tokens."""
        self.num_drafts = np.zeros(len(table.num_tokens), np.int64)
        self.failures: Mapping[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    @property
    def num_tokens(self) -> Ints:
        """[C]; known tokens, and guesses."""
        return self._table.num_tokens + self.num_guessed

    def place(self, rows: Ints, ends: Ints, token_ids: Ints) -> None:
        """Write guesses behind the rows' other tokens."""
        self._table.place_tokens(rows, ends, token_ids)

    def sampling_batch(self, rows: Ints) -> SamplingBatch:
        """How the model will draw the rows' next tokens, but for rules on single logits.

        Args:
            rows: [B]; of the table.
        """
        table, settings = self._table, self._table.sampling
        written = table.num_tokens[rows] + self.num_guessed[rows]
        return SamplingBatch(
            temperature=settings.temperature[rows],
            top_p=settings.top_p[rows],
            top_k=settings.top_k[rows],
            min_p=settings.min_p[rows],
            keys=settings.keys[rows],
            num_logprobs=np.full(len(rows), NOT_WANTED, np.int64),
            num_output_tokens=written - table.num_prompt_tokens[rows],
            rules=(),
        )

    def follow(self, *tables: object) -> None:
        """What follows a table is told by the worker's."""

    def grow(self) -> None:
        """Have as many rows as the worker's table."""
        missing = len(self._table.num_tokens) - len(self.num_computed_tokens)
        if missing > 0:
            more = np.zeros(missing, np.int64)
            self.num_computed_tokens = np.concatenate([self.num_computed_tokens, more])
            self.num_guessed = np.concatenate([self.num_guessed, more])
            self.num_drafts = np.concatenate([self.num_drafts, more])


class DraftContext(NamedTuple):
    """Parts of a worker with which a model or head guesses."""

    table: RequestTable
    """Of the requests."""
    with_metadata: Callable[[ForwardBatch], ForwardBatch]
    """Adds each cache group's attention metadata to a batch."""
    sampler: Sampler
    """Draws tokens."""
    block_size: int
    """Tokens per cache block."""
    device: torch.device
    """Of the models."""
    max_len: int
    """Longest context."""

    def inputs(self, view: DraftView) -> InputBuilder:
        """Makes batches of a view's tokens."""
        return InputBuilder(view, block_size=self.block_size, device=self.device)  # type: ignore[arg-type]
