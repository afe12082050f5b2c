"""``rg_lru``, for the suite of recurrences (:mod:`headrace_testing.ops.recurrent`)."""

from __future__ import annotations

from headrace_testing.ops.recurrences import Rand, Recurrence, RecurrentCase


def make(rand: Rand, dtype: str, tokens: int, variant: int) -> RecurrentCase:
    """See :class:`Recurrence`."""
    channels = 37
    fused = rand(tokens, 3 * channels, dtype=dtype, seed=1)
    x, opens, decays = fused.chunk(3, dim=1)
    by_token = {"x": x, "input_gate": opens, "decay_gate": decays}
    names = ("decay", "input_bias", "decay_bias")
    whole = {name: rand(channels, seed=seed) for seed, name in enumerate(names)}
    whole["decay"] -= 3
    return RecurrentCase("rg_lru", by_token, whole, (channels,))


RECURRENCE = Recurrence("rg_lru", make, 1, (0,))
