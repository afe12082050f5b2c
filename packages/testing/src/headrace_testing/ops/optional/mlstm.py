"""``mlstm``, for the suite of recurrences (:mod:`headrace_testing.ops.recurrent`)."""

from __future__ import annotations

import torch

from headrace_testing.ops.recurrences import Rand, Recurrence, RecurrentCase


def make(rand: Rand, dtype: str, tokens: int, variant: int) -> RecurrentCase:
    """See :class:`Recurrence`."""
    heads, length, size = ((3, 20, 37), (2, 7, 5))[variant]
    fused = rand(tokens, heads * (2 * length + size), dtype=dtype, seed=1)
    query, key, value = torch.split(fused, [heads * length] * 2 + [heads * size], dim=1)
    gates = rand(tokens, 2 * heads, seed=2) * 3
    by_token = {
        "query": torch.unflatten(query, 1, (heads, length)),
        "key": torch.unflatten(key, 1, (heads, length)),
        "value": torch.unflatten(value, 1, (heads, size)),
        "input_gate": gates[:, :heads],
        "forget_gate": gates[:, heads:] + 2,
    }
    whole = {"scale": length**-0.5, "eps": 1e-6}
    return RecurrentCase("mlstm", by_token, whole, (heads, length * size + length + 1))


RECURRENCE = Recurrence("mlstm", make, 2, (0,))
