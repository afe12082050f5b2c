"""Pairs of texts to be scored: what may be given and asked, and which goes with which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_core.errors import RequestError
from headrace_core.pooling import PoolingInfo, PoolingParams
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


_SCORES: Mapping[str, str] = {
    "cosine": "the cosine of two embeddings",
    "late_interaction": "the sum of the best matches of two texts' vectors",
}
"""Score functions of models that embed each text."""


def check_activation(params: PoolingParams, info: PoolingInfo) -> None:
    """Refuse an activation where no logits are: those of a score, not of the task behind it.

    Raises:
        RequestError: the model embeds each text.
    """
    if info.scoring not in _SCORES:
        return
    for name in ("use_activation", "softmax", "activation"):
        value = getattr(params, name)
        if value is not None:
            raise RequestError(
                f"{name} = {value!r}: must be left out: a score of an embedding model (LLM.score, "
                f"/score, /rerank) is {_SCORES[info.scoring]}, which nothing activates",
                param=name,
                value=value,
            )
