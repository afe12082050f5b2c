"""ModernBERT: a rotary encoder with gated MLPs, windows on two layers of three, and no biases.

Warner et al. 2024, arXiv:2412.13663. Windowed and full layers rotate by different bases; the first
layer has no norm before its attention, as the embeddings' norm stands there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention import BidirectionalAttention
from headrace_models.layers.base import Layer
from headrace_models.layers.blocks import NoNorm, PreNormBlock
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.mlp import GatedMLP
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.rotary import rotary_table
from headrace_models.mapping import ALL_PARTS
from headrace_models.rope import rope_settings
from headrace_models.settings import MAX_LAYERS, Settings

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

GLOBAL_THETA, LOCAL_THETA = 160_000.0, 10_000.0


def _rules(prefix: str) -> tuple[WeightRule, ...]:
    layer, ours = f"{prefix}layers.{{}}", "layers.{}"
    return (
        WeightRule(f"{prefix}embeddings.tok_embeddings", "embed"),
        WeightRule(f"{prefix}embeddings.norm", "embed_norm"),
        WeightRule(f"{layer}.attn_norm", f"{ours}.input_norm"),
        WeightRule(f"{layer}.attn.Wqkv", f"{ours}.attention.qkv", split=ALL_PARTS),
        WeightRule(f"{layer}.attn.Wo", f"{ours}.attention.out"),
        WeightRule(f"{layer}.mlp_norm", f"{ours}.mlp_norm"),
        WeightRule(f"{layer}.mlp.Wi", f"{ours}.mlp.gate_up", split=ALL_PARTS),
        WeightRule(f"{layer}.mlp.Wo", f"{ours}.mlp.down"),
        WeightRule(f"{prefix}final_norm", "final_norm"),
    )


class ModernBertModel(Layer):
    """Embeds; its classifiers derive from it."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*_rules("model."), *_rules(""))

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        self.context = context
        self.settings = Settings(context.config)
        hidden = self.settings.integer("hidden_size")
        vocab = self.settings.integer("vocab_size")
        self.embed = Embedding(context, f"{prefix}embeddings.tok_embeddings", vocab, hidden)
        self.embed_norm = self.make_norm(context, f"{prefix}embeddings.norm")
        self.rotary, self.local_rotary = _rotary_tables(context, self.settings)
        self.layers = [
            self.make_block(context, index, f"{prefix}layers.{index}")
            for index in range(self.settings.integer("num_hidden_layers", maximum=MAX_LAYERS))
        ]
        self.final_norm = self.make_norm(context, f"{prefix}final_norm")

    def make_norm(self, context: BuildContext, name: str) -> LayerNorm:
        hidden, eps = self.settings.integer("hidden_size"), self.settings.number("norm_eps", 1e-5)
        return LayerNorm(context, name, hidden, eps, bias=self.settings.flag("norm_bias", False))

    def make_block(self, context: BuildContext, index: int, name: str) -> PreNormBlock:
        return PreNormBlock(
            self.make_norm(context, f"{name}.attn_norm") if index else NoNorm(),
            self.make_attention(context, index, f"{name}.attn"),
            self.make_norm(context, f"{name}.mlp_norm"),
            GatedMLP(
                context,
                f"{name}.mlp",
                self.settings.integer("hidden_size"),
                self.settings.integer("intermediate_size"),
                self.settings.activation("hidden_activation"),
                bias=self.settings.flag("mlp_bias", False),
                stored_fused=True,
                fused_name="Wi",
                down_name="Wo",
            ),
        )

    def make_attention(
        self, context: BuildContext, index: int, name: str
    ) -> BidirectionalAttention:
        heads = self.settings.integer("num_attention_heads")
        bias = self.settings.flag("attention_bias", False)
        # The config's number is the whole width: half of it lies on either side.
        reach = self.settings.integer("local_attention", 128) // 2
        sliding = self.is_sliding(index)
        return BidirectionalAttention(
            context,
            name,
            hidden_size=self.settings.integer("hidden_size"),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=self.settings.head_dim(),
            rotary=self.local_rotary if sliding else self.rotary,
            sliding_window=reach if sliding else None,
            qkv_bias=bias,
            out_bias=bias,
            qkv_name="Wqkv",
            out_name="Wo",
            part_names=(),
        )

    def is_sliding(self, index: int) -> bool:
        kinds = self.settings.layer_types()
        if kinds is not None:
            return kinds[index] == "sliding_attention"
        return index % self.settings.integer("global_attn_every_n_layers", 3) != 0

    def attention_layers(self) -> Mapping[str, Any]:
        """See :class:`headrace_core.model.SupportsPooling`; no layer reads a cache."""
        return {}

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See :class:`headrace_core.model.SupportsPooling`."""
        x, residual = self.embed_norm(self.embed(batch.input_ids)), None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        hidden, _ = self.final_norm.add(x, residual)
        return hidden


def _rotary_tables(context: BuildContext, settings: Settings) -> tuple[Tensor, Tensor]:
    """Of the full layers, of the windowed ones. Old configs have a key for each base."""
    size, limit = settings.head_dim(), settings.integer("max_position_embeddings", 8192)
    far = settings.positive("global_rope_theta", GLOBAL_THETA)
    near = settings.positive("local_rope_theta", LOCAL_THETA)
    full = rope_settings(context.config, "full_attention", theta=far)
    local = rope_settings(context.config, "sliding_attention", theta=near)
    return (
        rotary_table(context, full, size, max_positions=limit),
        rotary_table(context, local, size, max_positions=limit),
    )
