"""Granite with windows on three of four layers, attention sinks, and a rotary base for each layer.

Block: ``h = x + s * attention(norm(x)); h + s * mlp(norm(h))``.

IBM 2026; sinks as a logit for each head: OpenAI 2025, arXiv:2508.10925.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.granite import Multipliers, layer_rotary_tables, layer_window
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.norm import NormLayer
from headrace_models.loading.rules.llama import RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.ops import OpTable


class GraniteSWABlock(Block):
    """``h = x + s * attention(norm(x)); h + s * mlp(norm(h))``."""

    def __init__(
        self,
        ops: OpTable,
        scale: float,
        input_norm: NormLayer,
        attention: SelfAttention,
        mlp_norm: NormLayer,
        mlp: MLPLayer,
    ) -> None:
        self.ops = ops
        self.scale = scale
        self.input_norm = input_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        x = self.ops.scale(self.attention(x, batch), self.scale)
        x, stream = self.mlp_norm.add(x, stream)
        return self.ops.scale(self.mlp(x), self.scale), stream


class GraniteSWAForCausalLM(LlamaDecoder):
    """Granite 4.1 dense."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *RULES,
        WeightRule("model.layers.{}.self_attn.sinks", "layers.{}.attention.sinks.weight"),
    )
    ties_embeddings: ClassVar[bool] = True
    default_eps: ClassVar[float] = 1e-5

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.multipliers = Multipliers.from_settings(self.settings)
        self.rotary = None  # each layer has its own
        self.tables = layer_rotary_tables(
            context, self.settings, self.num_layers(), self.head_dim()
        )

    def token_vectors(self, ids: Tensor) -> Tensor:
        return self.context.ops.scale(self.embed(ids), self.multipliers.embedding)

    def logits_multiplier(self) -> float:
        return self.multipliers.logits

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return GraniteSWABlock(
            context.ops,
            self.multipliers.residual,
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        return self.attention(
            context,
            name,
            rotary=self.tables[index],
            scale=self.multipliers.scores,
            sliding_window=layer_window(self.settings, index),
            sinks=True,
            qkv_bias=bias,
            out_bias=bias,
        )
