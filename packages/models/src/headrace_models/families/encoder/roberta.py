"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT whose positions follow the padding token's id.

Liu et al. 2019, arXiv:1907.11692; Conneau et al. 2019, arXiv:1911.02116. ``layers/encoders/bert.py`` has
the encoder, here are the heads on it::

    x = norm(word + position + segment)     positions begin at pad_token_id + 1
    h = norm(x + attention(x))              per block
    x = norm(h + down(gelu(up(h))))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.encoders.bert import BertEncoder
from headrace_models.loading.rules.bert import encoder_rules
from headrace_models.pooling.classifier import (
    DENSE_RULES,
    OUT_RULE,
    Classifier,
    dense_classifier,
    token_classifier,
)

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_ENCODER = (*encoder_rules("roberta."), *encoder_rules(""))


class RobertaModel(BertEncoder):
    """Also serves checkpoints whose head guesses masked words, without it."""

    weight_rules: ClassVar[Sequence[WeightRule]] = _ENCODER
    base_name: ClassVar[str] = "roberta"
    positions_after_padding: ClassVar[bool] = True


class RobertaForSequenceClassification(RobertaModel):
    """Labels of the first token, through a dense layer of the head's own."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*_ENCODER, *DENSE_RULES)

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier | None:
        return dense_classifier(context, self.hidden_size())


class RobertaForTokenClassification(RobertaModel):
    """Labels of each token."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*_ENCODER, OUT_RULE)

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier | None:
        return token_classifier(context, self.hidden_size())
