"""``wkv``, for the suite of recurrences (:mod:`headrace_testing.ops.recurrent`)."""

from __future__ import annotations

from torch import Tensor

from headrace_testing.ops.recurrences import Rand, Recurrence, RecurrentCase


def make(rand: Rand, dtype: str, tokens: int, variant: int) -> RecurrentCase:
    """See :class:`Recurrence`."""
    channels = 21
    key, value = rand(tokens, 2 * channels, dtype=dtype, seed=1).chunk(2, dim=1)
    whole = {"decay": -rand(channels).exp() * 0.3, "first": rand(channels, seed=2)}
    return RecurrentCase("wkv", {"key": key * 2, "value": value}, whole, (3, channels))


def _positive(states: Tensor) -> None:
    states[:, :, 1] = states[:, :, 1].abs() + 1  # a denominator


RECURRENCE = Recurrence("wkv", make, 1, (0,), _positive)
