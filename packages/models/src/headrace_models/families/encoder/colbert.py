"""ColBERT as its authors store it: BERT and one projection, ``linear``, of each token's vector::

    x = norm(word + position + segment)
    h = norm(x + attention(x))              per block
    x = norm(h + down(gelu(up(h))))
    vector = linear(x)                      per token

Khattab and Zaharia 2020, arXiv:2004.12832; Santhanam et al. 2021, arXiv:2112.01488. Checkpoints of PyLate
and Sentence Transformers name their encoder instead, and have the projection in a Dense module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.encoders.bert import BertEncoder
from headrace_models.loading.rules.bert import UNUSED_HEADS, encoder_rules


class ColbertModel(BertEncoder):
    """A vector for each token; the projection is loaded as a Dense module."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*encoder_rules("bert."), *encoder_rules(""))
    base_name: ClassVar[str] = "bert"
    ignored_weights: ClassVar[Mapping[str, str]] = {
        **UNUSED_HEADS,
        r"linear\.weight": "the Dense module's, again",
    }
