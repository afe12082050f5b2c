"""Speculative decoding: who guesses the next tokens of requests, so that a step checks several at once.

The engine draws every token from the model as it would without guesses, and keeps what follows as long as
the guesses are what it drew: outputs are the same whatever is guessed. A guess costs time only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch


class DraftTask(NamedTuple):
    """A request whose next tokens are to be guessed."""

    request_id: str
    token_ids: Any
    """numpy int32; all tokens so far, prompt first. A view, good until the call ends."""
    num_prompt_tokens: int
    most: int
    """Guesses that the step has room for, at least 1."""


class DraftProposer(ABC):
    """The class behind an entry point of ``headrace.draft_proposers``; used from the worker's thread only.

    Args:
        settings: the speculative configuration's fields that are given.

    Raises: ConfigError: one is missing or wrong; names it.
    """

    @abstractmethod
    def __init__(self, settings: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Sequence[int]]:
        """Guesses for each task, best known first token first; [] where there are none. Runs before every
        step: microseconds count."""

    def finish(self, request_id: str, token_ids: Any, num_prompt_tokens: int) -> None:
        """A request has gone: ended, or preempted and not yet back."""
        return


class StepStates(NamedTuple):
    """The model's hidden states of a step, once its tokens are chosen. Letters: T rows, B requests, H hidden
    size. Good until the call ends."""

    request_ids: Sequence[str]
    starts: Any
    """numpy [B] int64; each request's first row."""
    counts: Any
    """numpy [B] int64; rows of right tokens. Those of wrong guesses stand behind them, and are left out."""
    positions: Any
    """numpy [B] int64; position of the first row's token in its request."""
    hidden: Tensor
    """[T, H]; behind the final norm, as the head gets them."""
    streams: Sequence[Tensor]
    """[T, H] each, of :attr:`ReadsStates.streams`."""


class ReadsStates(DraftProposer):
    """A proposer that is told the model's hidden states, of every row that steps compute: prompts, also in
    chunks, and tokens. Rows that were found in the prefix cache are not computed."""

    streams: Sequence[int] = ()
    """Layers before which the stream is wanted, from 0; the number of layers: behind the last one."""

    @abstractmethod
    def observe(self, states: StepStates) -> None:
        """A step has run."""


@runtime_checkable
class ShowsStreams(Protocol):
    """A model that shows the stream between its layers."""

    @property
    def num_streams(self) -> int:
        """Streams that there are: one more than layers. 0: it shows none."""

    def forward_streams(
        self, batch: ForwardBatch, layers: Sequence[int]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """``forward`` of all rows, and the stream [T, H] before each of these layers."""
