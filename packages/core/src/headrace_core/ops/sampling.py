"""Ops that choose tokens from logits, and describe the choice. Letters: :mod:`headrace_core.ops`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class SampleOp(Protocol):
    def __call__(
        self,
        logits: Tensor,
        temperature: Tensor,
        min_p: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        uniform: Tensor,
        *,
        keep_filtered: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Choose one token per row: logits [T, V] -> (token_ids [T] int64, largest [T] float32).

        The settings are on the CPU wherever the logits are, [T] each: temperature float32, min_p
        float32, top_k int64 (0 = all), top_p float64, uniform float64 in [0, 1).

        A row whose temperature is below :data:`~headrace_core.sampling.params.GREEDY_BELOW` gets its
        largest logit, of equals the lowest id. Any other: ``y = logits * (1 / temperature)`` in float32;
        tokens with ``y < max(y) + log(min_p)`` go; then all but the top_k largest; then all but
        the fewest of the largest whose weights ``exp(y - max(y))`` reach top_p times the weights of
        what was left; of equals the lowest ids stay. The token is the first at which the running
        sum, in token order, of the remaining weights exceeds ``uniform`` times their sum. Weights
        are float32 (below 2e-35: 0), sums float64, in any order that depends on the row alone.

        ``largest`` is the row's largest logit, NaN if one is NaN. Where it is not finite the token
        is 0 and means nothing. logits may have any floating dtype and are not changed, unless
        ``keep_filtered`` (float32 only): then rows that are not greedy become y, and -inf for the
        tokens that went.
        """


class TopLogprobs(NamedTuple):
    """Entries of T rows: the given token first, then the best ones without it, best first."""

    token_ids: Tensor
    """[T, n] int64; n at least the largest count + 1. Unspecified past a row's size."""
    values: Tensor
    """[T, n] float32."""
    ranks: Tensor
    """[T, n] int64; 1 + number of strictly greater values in the row."""
    sizes: Tensor
    """[T] int64; how many entries: count, plus one if the token is not among the best."""


class TopLogprobsOp(Protocol):
    def __call__(
        self, logits: Tensor, token_ids: Tensor, counts: Tensor, *, normalize: bool
    ) -> TopLogprobs:
        """Log-probabilities of one token and of the best of each row of logits [T, V], any dtype.

        token_ids [T] int64 within [0, V); counts [T] int64 within [0, V], how many best ones.
        Values are ``(logits - largest) - log(sum(exp(logits - largest)))`` in float32 with
        ``normalize``, else the logits. Best are the largest values, of equal values the lowest ids.
        A row that has no log-probabilities (a NaN or +inf, or nothing but -inf) has one entry, the
        token's, with the value NaN. logits are not changed; results are on the CPU.
        """
