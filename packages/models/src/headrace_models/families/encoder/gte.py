"""GTE ("new" and multilingual): rotary BERT with gated MLPs (mGTE, gte-en-v1.5, arctic-embed-m-v2.0).

Zhang et al. 2024, arXiv:2407.19669. Its checkpoints call the architecture ``NewModel``, as others may:
overrides say that ``GteNewModel`` is meant. Gates are stored behind what they gate. The block is that of
``layers/encoders/rotary_bert.py``, with a gated MLP::

    x = norm(word + segment)
    h = norm(x + attention(x))              per block; queries and keys are rotated
    x = norm(h + down(gelu(gate(h)) * up(h)))
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
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.loading.mapping import ALL_PARTS
from headrace_models.pooling.classifier import OUT_RULE, Classifier, HeadLinear, token_classifier

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_PREFIXES = ("gte.", "new.", "")
_NORM = "embeddings.LayerNorm"
_FUSED_NAMES = LayerNames(
    "encoder.layer.{}", "attention.qkv_proj", "attention.o_proj", "attn_ln", "mlp_ln"
)
_DOWN = WeightRule("mlp.down_proj", "mlp.down")
_FUSED_MLP = (WeightRule("mlp.up_gate_proj", "mlp.gate_up", split=ALL_PARTS, order=(1, 0)), _DOWN)
_SPLIT_MLP = (
    WeightRule("mlp.gate_proj", "mlp.gate_up", part=0),
    WeightRule("mlp.up_proj", "mlp.gate_up", part=1),
    _DOWN,
)
_RULES = (
    *encoder_rules(_PREFIXES, _FUSED_NAMES, _FUSED_MLP, norm=_NORM),
    *encoder_rules(_PREFIXES, SPLIT_NAMES, _SPLIT_MLP, norm=_NORM),
)


class GteModel(RotaryBert):
    """Embeds by its first token."""

    weight_rules: ClassVar[Sequence[WeightRule]] = _RULES
    base_name: ClassVar[str] = "new"
    theta: ClassVar[float] = 160_000.0
    num_segments: ClassVar[int] = 1

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_act"),
            down_bias=True,
        )


class GteForSequenceClassification(GteModel):
    """Labels of the first token, through BERT's pooler; gte-multilingual-reranker."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *_RULES,
        *(WeightRule(f"{p}pooler.dense", "pooler.head.classifier.dense") for p in _PREFIXES),
        OUT_RULE,
    )

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier | None:
        assert context.pooling is not None
        hidden, labels = self.hidden_size(), context.pooling.num_labels
        dense = HeadLinear(context, f"{prefix}pooler.dense", hidden, hidden)
        return Classifier(HeadLinear(context, "classifier", hidden, labels), dense)


class GteForTokenClassification(GteModel):
    """Labels of each token."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*_RULES, OUT_RULE)

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier | None:
        return token_classifier(context, self.hidden_size())
