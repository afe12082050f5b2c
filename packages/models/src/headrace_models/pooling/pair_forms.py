"""Prompts and scores of rerankers whose form is in their code, not in their files. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class PairForm(NamedTuple):
    """The prompt and the score of a pair, as a class defines them."""

    template: str
    """Jinja template, which gets two messages of the roles ``query`` and ``document``."""
    end_id: int
    """Token behind the prompt, whose state is scored."""
    logit_bias: float
    """Taken from each logit."""


JINA_VL = PairForm(
    "**Document**:\n{{ (messages | selectattr('role', 'equalto', 'document') | first).content }}\n"
    "**Query**:\n{{ (messages | selectattr('role', 'equalto', 'query') | first).content }}",
    end_id=100,
    logit_bias=2.65,
)
"""jina-reranker-m0's: https://huggingface.co/jinaai/jina-reranker-m0, ``modeling.py``."""
PAIR_FORMS: Mapping[str, PairForm] = {
    "JinaVLForRanking": JINA_VL,
    "JinaVLForSequenceClassification": JINA_VL,
}
"""By architecture."""
