"""Base of all text encoders: embeddings, a stack of blocks, a pooler.

A step is written so that it can be recorded (docs/extending/step-graphs.md): all arithmetic is the
ops', nothing branches on sizes or reads contents. Pooling comes after it and is not recorded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer
from headrace_models.layers.decoder import Norm
from headrace_models.pooling.pooler import make_pooler

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import AttentionLayer, BuildContext, Pooler, WeightRule
    from headrace_models.layers.attention.encoder_attention import EncoderAttention
    from headrace_models.layers.mlp import MLPLayer
    from headrace_models.pooling.classifier import Classifier


class EncoderBlock(Layer, ABC):
    """One layer of the stack."""

    @abstractmethod
    def __call__(self, x: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Tensor:
        """x [T, H] -> the same shape, or with rows [R] int64 only those of it: what comes behind the
        attention is by row, so the others need not be computed."""


class PostNormBlock(EncoderBlock):
    """``h = norm(x + attention(x)); norm(h + mlp(h))``: the first transformer's, and BERT's."""

    def __init__(
        self, attention: EncoderAttention, attention_norm: Norm, mlp: MLPLayer, mlp_norm: Norm
    ) -> None:
        self.ops = attention.ops
        self.attention = attention
        self.attention_norm = attention_norm
        self.mlp = mlp
        self.mlp_norm = mlp_norm

    def __call__(self, x: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Tensor:
        attended = self.attention(x, batch, rows)
        x, _ = self.attention_norm.add(attended, x if rows is None else self.ops.embedding(rows, x))
        x, _ = self.mlp_norm.add(self.mlp(x), x)
        return x


class Encoder(Layer, ABC):
    """A model that turns tokens into vectors; core's ``SupportsPooling``. Families say what differs.

    Args:
        prefix: start of the checkpoint's names, if the model is part of another.
    """

    weight_rules: ClassVar[Sequence[WeightRule]]
    ignored_weights: ClassVar[Mapping[str, str]] = {}
    module_names: ClassVar[Sequence[tuple[str, str]]] = ()
    """See :class:`~headrace_models.layers.decoder.Decoder`."""

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        self.context = context
        self.settings = Settings(context.config)
        self.embed = self.make_embeddings(context, prefix)
        self.prepare(context, prefix)
        self.make_layers(context, prefix)
        self.pooler: Pooler = self.make_pooler(context, prefix)

    def hidden_size(self) -> int:
        return self.settings.integer("hidden_size")

    def num_layers(self) -> int:
        return self.settings.integer("num_hidden_layers", maximum=MAX_LAYERS)

    @abstractmethod
    def make_embeddings(self, context: BuildContext, prefix: str) -> Embeddings:
        """Make the layer whose output the first block reads."""

    def prepare(self, context: BuildContext, prefix: str) -> None:
        """Make what the blocks share (rotary tables), before the first one."""

    @abstractmethod
    def make_layers(self, context: BuildContext, prefix: str) -> None:
        """Make the stack."""

    def make_pooler(self, context: BuildContext, prefix: str) -> Pooler:
        """Make the pooler; the config of pooling decides, but for a few classes."""
        return make_pooler(context, self.make_classifier(context, prefix))

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier | None:
        """Make the layer that turns hidden states into logits; None: the model embeds."""
        return None

    @abstractmethod
    def run_layers(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """The stack: x [T, H] -> final hidden states [R, H] of ``batch.logits_rows``."""

    def attention_layers(self) -> Mapping[str, AttentionLayer]:
        """Empty: no layer of an encoder reads a cache."""
        return {}

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See :class:`headrace_core.model.SupportsPooling`."""
        return self.run_layers(self.embed(batch), batch)

    def chosen(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Rows of x [T, H] that the pooler reads -> [R, H]."""
        rows = batch.logits_rows
        return x if rows is None else self.context.ops.embedding(rows, x)


class Embeddings(Layer, ABC):
    """Makes the first block's input of token ids."""

    @abstractmethod
    def __call__(self, batch: ForwardBatch) -> Tensor:
        """[T, H]."""


class PostNormEncoder(Encoder):
    """Blocks hand on normed vectors; there is no final norm."""

    def make_layers(self, context: BuildContext, prefix: str) -> None:
        self.layers = [
            self.make_block(context, index, prefix) for index in range(self.num_layers())
        ]

    @abstractmethod
    def make_block(self, context: BuildContext, index: int, prefix: str) -> EncoderBlock:
        """The stack's layer ``index``."""

    def run_layers(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x, batch)
        if self.context.adapters is not None:  # whose slots are those of all rows
            return self.chosen(self.layers[-1](x, batch), batch)
        return self.layers[-1](x, batch, batch.logits_rows)
