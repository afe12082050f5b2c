"""BGE-M3 with all three of its outputs: XLM-RoBERTa, a dense embedding, a weight and a vector for each
token. Chen et al. 2024, arXiv:2402.03216.

Its config names the plain encoder, which gives the dense embedding alone; overrides ask for this class:
``{"architectures": ["BgeM3EmbeddingModel"]}``. The two further layers are published as pickles, which
are not read: they must be in the checkpoint's safetensors as ``sparse_linear`` and ``colbert_linear``.
``layers/encoders/bert.py`` has the encoder, here is the pooler on it::

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
from headrace_models.pooling.classifier import HeadLinear
from headrace_models.pooling.three_ways import ThreeWayPooler

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class BgeM3EmbeddingModel(BertEncoder):
    """Tasks: ``embed`` (dense), ``token_embed`` (multi-vector), ``token_classify`` (lexical weights)."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *encoder_rules("roberta."),
        *encoder_rules(""),
        WeightRule("sparse_linear", "pooler.weigh"),
        WeightRule("colbert_linear", "pooler.project"),
    )
    base_name: ClassVar[str] = "roberta"
    positions_after_padding: ClassVar[bool] = True

    def make_pooler(self, context: BuildContext, prefix: str) -> ThreeWayPooler:
        hidden = self.hidden_size()
        size = self.settings.integer("colbert_dim", hidden)
        return ThreeWayPooler(
            context,
            weigh=HeadLinear(context, "sparse_linear", hidden, 1),
            project=HeadLinear(context, "colbert_linear", hidden, size),
            first=self.settings.integer("bos_token_id", 0, minimum=0),
            last=self.settings.integer("eos_token_id", 2, minimum=0),
        )
