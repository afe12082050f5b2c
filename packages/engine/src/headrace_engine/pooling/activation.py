"""Activations of scores: embedding models have none."""

from __future__ import annotations

from collections.abc import Mapping

from headrace_core.errors import RequestError
from headrace_core.pooling import PoolingInfo, PoolingParams

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
