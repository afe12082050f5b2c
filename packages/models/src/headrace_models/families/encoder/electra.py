"""ELECTRA: BERT whose embeddings may be narrower than its blocks.

Clark et al. 2020, arXiv:2003.10555. ``layers/encoders/bert.py`` has the encoder, here are the widening
layer and the heads::

    x = widen(norm(word + position + segment))
    h = norm(x + attention(x))              per block
    x = norm(h + down(gelu(up(h))))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.base import Part
from headrace_models.layers.encoders.bert import BertEncoder
from headrace_models.layers.linear import Linear
from headrace_models.loading.rules.bert import UNUSED_HEADS, encoder_rules
from headrace_models.pooling.classifier import (
    DENSE_RULES,
    OUT_RULE,
    Classifier,
    dense_classifier,
    token_classifier,
)

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

_ENCODER = (
    *encoder_rules("electra."),
    *encoder_rules(""),
    WeightRule("electra.embeddings_project", "widen"),
    WeightRule("embeddings_project", "widen"),
)


class ElectraModel(BertEncoder):
    """The encoder alone; embeds."""

    weight_rules: ClassVar[Sequence[WeightRule]] = _ENCODER
    ignored_weights: ClassVar[Mapping[str, str]] = {
        **UNUSED_HEADS,
        r"(discriminator_predictions|generator_predictions|generator_lm_head)\..*": (
            "heads of the pre-training"
        ),
    }
    base_name: ClassVar[str] = "electra"

    def embedding_size(self) -> int:
        return self.settings.integer("embedding_size", 128)

    def prepare(self, context: BuildContext, prefix: str) -> None:
        size, hidden = self.embedding_size(), self.hidden_size()
        self.widen: Linear | None = None
        if size != hidden:
            name = f"{prefix}embeddings_project"
            self.widen = Linear(context, name, size, [Part(hidden)], bias=True)

    def run_layers(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        return super().run_layers(x if self.widen is None else self.widen(x), batch)


class ElectraForSequenceClassification(ElectraModel):
    """Labels of the first token, by RoBERTa's head with another activation."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*_ENCODER, *DENSE_RULES)

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier | None:
        return dense_classifier(
            context, self.hidden_size(), lambda x: context.ops.activation(x, "gelu")
        )


class ElectraForTokenClassification(ElectraModel):
    """Labels of each token."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*_ENCODER, OUT_RULE)

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier | None:
        return token_classifier(context, self.hidden_size())
