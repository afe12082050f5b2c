"""CLIP's text encoder: GPT's blocks, the state of the end token, a projection into the space of images.

Radford et al. 2021, arXiv:2103.00020. ``families/vision_language/clip.py`` adds the tower for images.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.model import PoolingBatch, WeightRule
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.decoders.gpt import GPTDecoder, Names, without_prefix
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.linear import Linear
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.positions import LearnedPositions
from headrace_models.layers.vision.mlp import vision_mlp
from headrace_models.layers.vocabulary import vocab_shard
from headrace_models.pooling.heads import EmbeddingHead
from headrace_models.pooling.pooler import TaskPooler

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext, Rows
    from headrace_core.pooling import PoolingParams

NAMES = Names(
    embedding="text_model.embeddings.token_embedding",
    blocks="text_model.encoder.layers",
    final_norm="text_model.final_layer_norm",
    head="text_projection",
    input_norm="layer_norm1",
    attention="self_attn",
    qkv=("q_proj", "k_proj", "v_proj"),
    out="out_proj",
    mlp_norm="layer_norm2",
    up="mlp.fc1",
    down="mlp.fc2",
    positions="text_model.embeddings.position_embedding",
)
_UNKNOWN_END = 2
"""``eos_token_id`` of configs that were written with a wrong one; then the largest id of a text ends it."""


class CLIPTextModelWithProjection(GPTDecoder):
    """Its blocks are :class:`~headrace_models.layers.blocks.PreNormBlock`. ``forward`` gives projected
    states [R, P]."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *NAMES.rules(),
        *without_prefix(NAMES.rules(), "text_model."),
    )
    pooler: EndTokenPooler

    def make_embedding(self, context: BuildContext, prefix: str) -> Embedding:
        vocab = self.settings.integer("vocab_size")
        name, shard = f"{prefix}{self.embedding_name}", vocab_shard(vocab, context.communicator)
        return Embedding(context, name, vocab, self.hidden_size(), shard=shard)

    def make_positions(self, context: BuildContext, prefix: str) -> LearnedPositions:
        return self.learned_positions(context, prefix, default=77)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        sizes = self.hidden_size(), self.settings.integer("intermediate_size")
        up, down = f"{name}.{self.names.up}", f"{name}.{self.names.down}"
        return vision_mlp(context, self.settings, up, down, sizes)

    def make_head(self, context: BuildContext, prefix: str) -> None:
        assert context.pooling is not None
        size = context.pooling.embedding_size
        self.head = Linear(context, f"{prefix}{self.head_name}", self.hidden_size(), [Part(size)])
        self.pooler = EndTokenPooler(context, self.settings.integer("eos_token_id"))

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See :class:`headrace_core.model.SupportsPooling`; [R, P]."""
        return self.head(super().forward(batch))


class EndTokenPooler(Layer):
    """Core's ``Pooler``: the vector of a text is that of its first end token, or of its last token if it has
    no end token.

    Args:
        end: id of the end token.
    """

    tasks: Sequence[str] = ("embed",)

    def __init__(self, context: BuildContext, end: int) -> None:
        assert context.pooling is not None
        self.end = end
        one_row = dataclasses.replace(context.pooling, pooling_type="LAST")
        self.pool = TaskPooler(one_row, EmbeddingHead(context))

    def rows(self, params: PoolingParams) -> Rows:
        """See :class:`headrace_core.model.Pooler`."""
        return "all"

    def __call__(self, batch: PoolingBatch) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.Pooler`."""
        ends = torch.tensor([self._place(ids) for ids in batch.token_ids])
        rows = (batch.cu_rows[:-1] + ends).to(batch.hidden.device)
        bounds = torch.arange(len(ends) + 1)
        chosen = PoolingBatch(batch.hidden[rows], bounds, batch.params, batch.token_ids)
        return self.pool(chosen)

    def _place(self, ids: Sequence[int]) -> int:
        end = max(ids) if self.end == _UNKNOWN_END else self.end
        return ids.index(end) if end in ids else len(ids) - 1
