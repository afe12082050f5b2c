"""Heads that guess by the model's hidden states. Letters: T rows of a step, R rows, W the head's
width, Vh its vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import AttentionLayer, CausalLM


class DraftHead(Protocol):
    """A part of a model that guesses by the model's hidden states."""

    streams: Sequence[int]
    """See :class:`headrace_core.speculation.ReadsStates`."""
    most: int | None
    """Guesses in a row that it can make; None: any number."""
    width: int
    """W."""
    target_methods: Sequence[str]
    """Its own methods, of ``token_vectors`` and ``compute_logits``, that are the model's."""
    token_ids: Tensor | None
    """[Vh] int64; the model's ids of the head's vocabulary. None: it is the model's."""

    def retarget(self, target: CausalLM) -> None:
        """Guess for another model of the same shapes, whose embeddings and head may be read, too.

        Raises:
            UnsupportedFeature: it has others.
        """
        ...

    def attention_layers(self) -> Mapping[str, AttentionLayer]:
        """Layers with a cache: the entry of position p is made of its state and of token p + 1. Without any,
        a guess depends on the last state only."""
        ...

    def project(self, hidden: Tensor, streams: Sequence[Tensor]) -> Tensor:
        """The model's states of a step -> [T, W], memory of the caller's own. Of a head without caches, as
        wide as :meth:`forward` takes them before the first guess."""
        ...

    def token_vectors(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> vectors that :meth:`forward` reads of them, of a head with caches."""
        ...

    def forward(
        self, batch: ForwardBatch, states: Tensor, depth: int, vectors: Tensor | None = None
    ) -> Tensor:
        """States [T, W] of tokens, each with the id that follows it in ``batch.input_ids`` -> [R, W], what
        stands for the states of the tokens behind. ``depth``: guesses that were made before; a head with
        caches pays no heed to it. ``vectors``: :meth:`token_vectors` of the ids, if they were looked up."""
        ...

    def compute_logits(self, states: Tensor, depth: int) -> Tensor:
        """[R, W] -> [R, Vh]."""
        ...


class BuildHead(Protocol):
    """Builds a model's head, and reads its weights."""

    def __call__(
        self, target: CausalLM, path: str | None, told: Callable[[Any], None] | None = None
    ) -> DraftHead:
        """Read it.

        Args:
            target: the model that it guesses for; its weights may still be missing.
            path: of the model's checkpoint, if it is another than at the start.
            told: is told how the head was loaded
                (:class:`headrace_engine.weights.update_set.LoadedModel`); None: those who update weights
                are.

        Raises:
            HeadraceError: it cannot be read, or guesses for no such model.
        """
        ...
