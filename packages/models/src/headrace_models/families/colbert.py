"""ColBERT as its authors store it: BERT and one projection, ``linear``, of each token's vector.

Khattab and Zaharia 2020, arXiv:2004.12832; Santhanam et al. 2021, arXiv:2112.01488. Checkpoints of PyLate
and Sentence Transformers name their encoder instead, and have the projection in a Dense module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from headrace_models.families.bert import UNUSED_HEADS, BertModel


class ColbertModel(BertModel):
    """A vector for each token; the projection is loaded as a Dense module."""

    ignored_weights: ClassVar[Mapping[str, str]] = {
        **UNUSED_HEADS,
        r"linear\.weight": "the Dense module's, again",
    }
