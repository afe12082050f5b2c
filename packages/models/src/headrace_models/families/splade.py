"""SPLADE: BERT that embeds by how much each word of the vocabulary is meant.

Formal et al. 2021, arXiv:2109.10086. Its config names ``BertForMaskedLM``, of which Sentence Transformers'
``SpladePooling`` makes this; without such a module, overrides ask for it:
``{"architectures": ["BertSpladeSparseEmbeddingModel"]}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.bert import BertModel
from headrace_models.layers.encoder_embeddings import TextEmbeddings
from headrace_models.pooling.activations import elementwise
from headrace_models.pooling.classifier import HeadLinear
from headrace_models.pooling.head_norm import HeadNorm
from headrace_models.pooling.head_rows import HeadRows
from headrace_models.pooling.sparse import SparsePooler, WordScores

if TYPE_CHECKING:
    from headrace_core.model import BuildContext, Pooler

_HEAD, _SCORES = "cls.predictions", "pooler.scores"


class BertSpladeModel(BertModel):
    """The head of the pre-training is what pools."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *BertModel.weight_rules,
        WeightRule(f"{_HEAD}.transform.dense", f"{_SCORES}.dense"),
        WeightRule(f"{_HEAD}.transform.LayerNorm", f"{_SCORES}.norm"),
        WeightRule(f"{_HEAD}.transform.LayerNorm.gamma", f"{_SCORES}.norm.weight"),
        WeightRule(f"{_HEAD}.transform.LayerNorm.beta", f"{_SCORES}.norm.bias"),
        WeightRule(f"{_HEAD}.decoder.weight", f"{_SCORES}.out.table"),
        WeightRule(f"{_HEAD}.bias", f"{_SCORES}.out.bias"),
        WeightRule(f"{_HEAD}.decoder.bias", f"{_SCORES}.out.own_bias"),
    )
    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"(.*\.)?pooler\..*": "made for guessing the next sentence",
        r"cls\.seq_relationship\..*": "made for guessing the next sentence",
        r"cls\.predictions\.decoder\.weight": "the table of words, again",
    }

    def make_pooler(self, context: BuildContext, prefix: str) -> Pooler:
        assert context.pooling is not None
        size, vocab = self.hidden_size(), self.settings.integer("vocab_size")
        embeddings = self.embed
        assert isinstance(embeddings, TextEmbeddings)
        words = embeddings.words
        tied = self.settings.flag("tie_word_embeddings", True)
        scores = WordScores(
            HeadLinear(context, f"{_HEAD}.transform.dense", size, size),
            elementwise(self.settings.activation("hidden_act")),
            HeadNorm(context, f"{_HEAD}.transform.LayerNorm", size, self.eps()),
            HeadRows(
                context,
                f"{_HEAD}.decoder",
                size,
                vocab,
                None,
                tied=(lambda: words.weight) if tied else None,
                bias=True,
            ),
        )
        return SparsePooler(
            scores,
            total=context.pooling.sparse_sum,
            twice=context.pooling.sparse_log_twice,
        )
