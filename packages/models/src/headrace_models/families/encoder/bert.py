"""BERT: learned positions, segments, post-norm blocks (MiniLM, E5, BGE, arctic-embed, ...).

Devlin et al. 2018, arXiv:1810.04805. ``layers/encoders/bert.py`` has the encoder, here are the heads on it::

    x = norm(word + position + segment)
    h = norm(x + attention(x))              per block
    x = norm(h + down(gelu(up(h))))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.encoders.bert import BertEncoder
from headrace_models.loading.rules.bert import encoder_rules
from headrace_models.pooling.classifier import OUT_RULE, Classifier, HeadLinear, token_classifier
from headrace_models.pooling.labels import num_labels

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_ENCODER = (*encoder_rules("bert."), *encoder_rules(""))


class BertModel(BertEncoder):
    """The encoder alone; embeds."""

    weight_rules: ClassVar[Sequence[WeightRule]] = _ENCODER
    base_name: ClassVar[str] = "bert"


class BertForSequenceClassification(BertModel):
    """Labels of the first token, through the pre-training's pooler; cross-encoders."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *_ENCODER,
        WeightRule("bert.pooler.dense", "pooler.head.classifier.dense"),
        WeightRule("pooler.dense", "pooler.head.classifier.dense"),
        OUT_RULE,
    )

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier | None:
        hidden, labels = self.hidden_size(), num_labels(context.config)
        dense = HeadLinear(context, f"{prefix}pooler.dense", hidden, hidden)
        return Classifier(HeadLinear(context, "classifier", hidden, labels), dense)


class BertForTokenClassification(BertModel):
    """Labels of each token."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*_ENCODER, OUT_RULE)

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier | None:
        return token_classifier(context, self.hidden_size())
