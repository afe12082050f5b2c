"""Inputs that blocks get of every token besides the stream: Gemma 3n and 4.

Google 2025, Gemma 3n. Letters: T tokens, H hidden size, L layers, P size of a layer's inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace_core.model import WeightRule
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.vocabulary import vocab_shard

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

PER_LAYER_RULES = (
    WeightRule("model.embed_tokens_per_layer", "per_layer.table"),
    WeightRule("model.per_layer_model_projection", "per_layer.projection"),
    WeightRule("model.per_layer_projection_norm", "per_layer.norm"),
    WeightRule("model.layers.{}.per_layer_input_gate", "layers.{}.per_layer.gate"),
    WeightRule("model.layers.{}.per_layer_projection", "layers.{}.per_layer.projection"),
    WeightRule("model.layers.{}.post_per_layer_input_norm", "layers.{}.per_layer.norm"),
)
"""For :class:`PerLayerInputs` of a decoder and a :class:`PerLayerGate` of each of its layers."""


class PerLayerInputs(Layer):
    """All layers' inputs: a second table's row for each token, and a projection of its vector.

    Args:
        prefix: of the checkpoint's names.
        num_rows: of the table. Tokens past it, placeholders of media, take its first row.
    """

    def __init__(
        self,
        context: BuildContext,
        prefix: str,
        *,
        vocab_size: int,
        num_rows: int,
        hidden_size: int,
        num_layers: int,
        size: int,
        eps: float,
    ) -> None:
        self.ops, self.size = context.ops, size
        width, beyond = num_layers * size, None if num_rows >= vocab_size else 0
        name = f"{prefix}embed_tokens_per_layer"
        shard = vocab_shard(num_rows, context.communicator)
        self.table = Embedding(context, name, num_rows, width, beyond=beyond, shard=shard)
        self.table_scale = float(torch.tensor(size**0.5, dtype=getattr(torch, context.dtype)))
        name = f"{prefix}per_layer_model_projection"
        self.projection = Linear(context, name, hidden_size, [Part(width)])
        self.projection_scale = hidden_size**-0.5
        self.norm = RMSNorm(context, f"{prefix}per_layer_projection_norm", size, eps)

    def __call__(self, ids: Tensor, vectors: Tensor) -> Tensor:
        """ids [T] int64, vectors [T, H] -> [T, L * P]."""
        looked_up = self.ops.scale(self.table(ids), self.table_scale)
        projected = self.ops.scale(self.projection(vectors), self.projection_scale)
        normed = self.norm(projected.view(-1, self.size)).view(looked_up.shape)
        return self.ops.scale(self.ops.add(normed, looked_up), 2**-0.5)

    def of(self, index: int, inputs: Tensor) -> Tensor:
        """Layer ``index``'s part of the result: [T, P], a view."""
        return inputs[:, index * self.size : (index + 1) * self.size]


class PerLayerGate(Layer):
    """``norm(projection(act(gate(x)) * inputs))``: a layer's inputs, let through as the stream says.

    Args:
        name: of the block, as the checkpoint spells it.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        size: int,
        activation: str,
        eps: float,
    ) -> None:
        self.ops, self.activation = context.ops, activation
        self.gate = Linear(context, f"{name}.per_layer_input_gate", hidden_size, [Part(size)])
        name_out = f"{name}.per_layer_projection"
        self.projection = Linear(context, name_out, size, [Part(hidden_size)])
        self.norm = RMSNorm(context, f"{name}.post_per_layer_input_norm", hidden_size, eps)

    def __call__(self, x: Tensor, inputs: Tensor) -> Tensor:
        """x [T, H], inputs [T, P] -> [T, H]."""
        gate = self.gate.activated(x, self.activation)
        return self.norm(self.projection(self.ops.gate(inputs, gate)))
