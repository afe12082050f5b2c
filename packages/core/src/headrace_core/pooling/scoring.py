"""Pairs of texts to be scored: what may be given, and which goes with which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_core.errors import RequestError
from headrace_core.request import TextPrompt, TokensPrompt

ScoreInput = str | TextPrompt | TokensPrompt | Mapping[str, Any]
"""One side of a pair: text, tokens, or ``{"content": [...]}`` with parts as in a chat message."""


def pair_up(
    data_1: Sequence[ScoreInput], data_2: Sequence[ScoreInput]
) -> list[tuple[ScoreInput, ScoreInput]]:
    """The pairs: 1:1, 1:N or N:N.

    Raises:
        RequestError: a side is empty, or the numbers fit no such form.
    """
    count_1, count_2 = len(data_1), len(data_2)
    if not count_1 or not count_2:
        raise RequestError(
            f"{count_1} and {count_2} texts to be scored: neither side may be empty", param="text_1"
        )
    if count_1 not in (1, count_2):
        raise RequestError(
            f"{count_1} and {count_2} texts to be scored: must be 1:1, 1:N or N:N", param="text_1"
        )
    first = data_1 if count_1 == count_2 else [data_1[0]] * count_2
    return list(zip(first, data_2))
