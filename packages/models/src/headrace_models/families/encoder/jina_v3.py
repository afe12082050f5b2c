"""Jina embeddings v3 as transformers has it: XLM-RoBERTa with rotation in place of positions.

Sturua et al. 2024, arXiv:2409.10173. The first repositories hold code and five task adapters inside the
weights; those are not served, converted ones with the adapter of a task merged are. The block is that of
``layers/encoders/rotary_bert.py``::

    x = norm(word + segment)
    h = norm(x + attention(x))              per block; queries and keys are rotated
    x = norm(h + down(gelu(up(h))))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.encoders.rotary_bert import (
    SPLIT_NAMES,
    LayerNames,
    RotaryBert,
    encoder_rules,
)
from headrace_models.layers.mlp import MLP, MLPLayer
from headrace_models.pooling.classifier import (
    DENSE_RULES,
    OUT_RULE,
    Classifier,
    dense_classifier,
    token_classifier,
)

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_PREFIXES = ("roberta.", "")
_OWN_NAMES = LayerNames("encoder.layers.{}", "mixer.Wqkv", "mixer.out_proj", "norm1", "norm2")
_MLP = (WeightRule("mlp.fc1", "mlp.up"), WeightRule("mlp.fc2", "mlp.down"))
_RULES = (
    *encoder_rules(_PREFIXES, _OWN_NAMES, _MLP, norm="emb_ln"),
    *encoder_rules(_PREFIXES, SPLIT_NAMES, _MLP, norm="embeddings.LayerNorm"),
)


class JinaEmbeddingsV3Model(RotaryBert):
    """Embeds by the mean."""

    weight_rules: ClassVar[Sequence[WeightRule]] = _RULES
    base_name: ClassVar[str] = "roberta"
    theta: ClassVar[float] = 20_000.0
    num_segments: ClassVar[int] = 1

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return MLP(
            context,
            f"{name}.fc1",
            f"{name}.fc2",
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_act"),
        )


class JinaEmbeddingsV3ForSequenceClassification(JinaEmbeddingsV3Model):
    """Labels of the first token, through a dense layer of the head's own."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*_RULES, *DENSE_RULES)

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier | None:
        return dense_classifier(context, self.hidden_size())


class JinaEmbeddingsV3ForTokenClassification(JinaEmbeddingsV3Model):
    """Labels of each token."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*_RULES, OUT_RULE)

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier | None:
        return token_classifier(context, self.hidden_size())
