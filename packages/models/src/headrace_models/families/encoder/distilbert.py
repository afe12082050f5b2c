"""DistilBERT: BERT with half of the layers and no segments.

Sanh et al. 2019, arXiv:1910.01108. ``layers/encoders/distilbert.py`` has the encoder, here
are the heads on it::

    x = norm(word + position)
    h = norm(x + attention(x))              per block
    x = norm(h + down(gelu(up(h))))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.encoders.distilbert import DISTILBERT_RULES, DistilBertEncoder
from headrace_models.pooling.classifier import OUT_RULE, Classifier, HeadLinear, token_classifier
from headrace_models.pooling.labels import num_labels

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class DistilBertModel(DistilBertEncoder):
    """The encoder alone; embeds."""


class DistilBertForSequenceClassification(DistilBertEncoder):
    """Labels of the first token, through a dense layer and a ReLU."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *DISTILBERT_RULES,
        WeightRule("pre_classifier", "pooler.head.classifier.dense"),
        OUT_RULE,
    )

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier | None:
        hidden, labels = self.hidden_size(), num_labels(context.config)
        return Classifier(
            HeadLinear(context, "classifier", hidden, labels),
            HeadLinear(context, "pre_classifier", hidden, hidden),
            lambda x: context.ops.activation(x, "relu"),
        )


class DistilBertForTokenClassification(DistilBertEncoder):
    """Labels of each token."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*DISTILBERT_RULES, OUT_RULE)

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier | None:
        return token_classifier(context, self.hidden_size())
