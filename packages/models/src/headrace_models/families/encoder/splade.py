"""SPLADE: encoders whose embedding has a weight for each token of the vocabulary::

    x = encoder(tokens)                     BERT's, DistilBERT's or RoBERTa's: layers/encoders/
    logits = out(norm(act(dense(x))))       the masked language model's head
    weight = max over tokens of log(1 + relu(logits))

Formal et al. 2021, arXiv:2109.10086. Their configs name a masked language model (``BertForMaskedLM``), of
which Sentence Transformers' ``SpladePooling`` makes this; a BERT without such a module is named by override:
``{"architectures": ["BertSpladeSparseEmbeddingModel"]}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.encoder import Encoder
from headrace_models.layers.encoder_embeddings import TextEmbeddings
from headrace_models.layers.encoders.bert import BertEncoder
from headrace_models.layers.encoders.distilbert import DISTILBERT_RULES, DistilBertEncoder
from headrace_models.loading.rules.bert import encoder_rules
from headrace_models.pooling.activations import elementwise
from headrace_models.pooling.classifier import HeadLinear
from headrace_models.pooling.head_norm import HeadNorm
from headrace_models.pooling.head_rows import HeadRows
from headrace_models.pooling.sparse import SparsePooler, WordScores

if TYPE_CHECKING:
    from headrace_core.model import BuildContext, Pooler

_SCORES = "pooler.scores"
_TWICE: Mapping[str, str] = {
    r"(.*\.)?pooler\..*": "made for guessing the next sentence",
    r"cls\.seq_relationship\..*": "made for guessing the next sentence",
    r"(cls\.predictions\.decoder|vocab_projector|lm_head\.decoder)\.weight": "the table of words, again",
}


class BertSpladeModel(BertEncoder):
    """BERT, pooled by the head of its pre-training."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *encoder_rules("bert."),
        *encoder_rules(""),
        WeightRule("cls.predictions.transform.dense", f"{_SCORES}.dense"),
        WeightRule("cls.predictions.transform.LayerNorm", f"{_SCORES}.norm"),
        WeightRule("cls.predictions.transform.LayerNorm.gamma", f"{_SCORES}.norm.weight"),
        WeightRule("cls.predictions.transform.LayerNorm.beta", f"{_SCORES}.norm.bias"),
        WeightRule("cls.predictions.decoder.weight", f"{_SCORES}.out.table"),
        WeightRule("cls.predictions.bias", f"{_SCORES}.out.bias"),
        WeightRule("cls.predictions.decoder.bias", f"{_SCORES}.out.own_bias"),
    )
    ignored_weights: ClassVar[Mapping[str, str]] = _TWICE
    base_name: ClassVar[str] = "bert"

    def make_pooler(self, context: BuildContext, prefix: str) -> Pooler:
        names = (
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.decoder",
        )
        activation = self.settings.activation("hidden_act")
        return sparse_pooler(context, self, names, activation, self.eps())


class DistilBertSpladeModel(DistilBertEncoder):
    """DistilBERT, pooled by the head of its pre-training."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *DISTILBERT_RULES,
        WeightRule("vocab_transform", f"{_SCORES}.dense"),
        WeightRule("vocab_layer_norm", f"{_SCORES}.norm"),
        WeightRule("vocab_projector.weight", f"{_SCORES}.out.table"),
        WeightRule("vocab_projector.bias", f"{_SCORES}.out.bias"),
    )
    ignored_weights: ClassVar[Mapping[str, str]] = _TWICE

    def make_pooler(self, context: BuildContext, prefix: str) -> Pooler:
        names = ("vocab_transform", "vocab_layer_norm", "vocab_projector")
        activation = self.settings.activation("activation")
        return sparse_pooler(context, self, names, activation, 1e-12)


class RobertaSpladeModel(BertEncoder):
    """RoBERTa, pooled by the head of its pre-training; that head's activation is GELU in any config."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *encoder_rules("roberta."),
        *encoder_rules(""),
        WeightRule("lm_head.dense", f"{_SCORES}.dense"),
        WeightRule("lm_head.layer_norm", f"{_SCORES}.norm"),
        WeightRule("lm_head.decoder.weight", f"{_SCORES}.out.table"),
        WeightRule("lm_head.bias", f"{_SCORES}.out.bias"),
        WeightRule("lm_head.decoder.bias", f"{_SCORES}.out.own_bias"),
    )
    ignored_weights: ClassVar[Mapping[str, str]] = _TWICE
    base_name: ClassVar[str] = "roberta"
    positions_after_padding: ClassVar[bool] = True

    def make_pooler(self, context: BuildContext, prefix: str) -> Pooler:
        names = ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder")
        return sparse_pooler(context, self, names, "gelu", self.eps())


def sparse_pooler(
    context: BuildContext,
    model: Encoder,
    names: tuple[str, str, str],
    activation: str,
    eps: float,
) -> SparsePooler:
    """The pooler of a masked language model's head.

    Args:
        names: the checkpoint's names of its dense layer, its norm, and the layer to the words.
    """
    assert context.pooling is not None
    dense, norm, out = names
    embeddings, size = model.embed, model.hidden_size()
    assert isinstance(embeddings, TextEmbeddings)
    words = embeddings.words
    tied = model.settings.flag("tie_word_embeddings", True)
    scores = WordScores(
        HeadLinear(context, dense, size, size),
        elementwise(activation),
        HeadNorm(context, norm, size, eps),
        HeadRows(
            context,
            out,
            size,
            model.settings.integer("vocab_size"),
            None,
            tied=(lambda: words.weight) if tied else None,
            bias=True,
        ),
    )
    return SparsePooler(
        scores, total=context.pooling.sparse_sum, twice=context.pooling.sparse_log_twice
    )
