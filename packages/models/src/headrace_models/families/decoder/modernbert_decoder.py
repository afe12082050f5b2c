"""ModernBERT as a decoder (Ettin): windows on two layers of three, a dense layer before the head.

Weller et al. 2025, arXiv:2507.11412; Warner et al. 2024, arXiv:2412.13663.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.layers.attention.selection import self_attention
from headrace_models.layers.base import Part
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block, Decoder
from headrace_models.layers.linear import Linear
from headrace_models.layers.mlp import GatedMLP
from headrace_models.layers.norm import LayerNorm, NoNorm
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.mapping import ALL_PARTS

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

THETAS = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}
OLD_THETAS = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}


class ModernBertDecoderForCausalLM(Decoder):
    """Ettin's decoders. What is called ``lm_head`` is the dense layer; the head is ``decoder``."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("model.embeddings.tok_embeddings", "embed"),
        WeightRule("model.embeddings.norm", "embedding_norm"),
        WeightRule("model.layers.{}.attn_norm", "layers.{}.input_norm"),
        WeightRule("model.layers.{}.attn.q_proj", "layers.{}.attention.qkv", part=0),
        WeightRule("model.layers.{}.attn.k_proj", "layers.{}.attention.qkv", part=1),
        WeightRule("model.layers.{}.attn.v_proj", "layers.{}.attention.qkv", part=2),
        WeightRule("model.layers.{}.attn.Wo", "layers.{}.attention.out"),
        WeightRule("model.layers.{}.mlp_norm", "layers.{}.mlp_norm"),
        WeightRule("model.layers.{}.mlp.Wi", "layers.{}.mlp.gate_up", split=ALL_PARTS),
        WeightRule("model.layers.{}.mlp.Wo", "layers.{}.mlp.down"),
        WeightRule("model.final_norm", "final_norm"),
        WeightRule("lm_head.dense", "dense"),
        WeightRule("lm_head.norm", "head_norm"),
        WeightRule("decoder", "head"),
    )
    ties_embeddings: ClassVar[bool] = True
    embedding_name: ClassVar[str] = "model.embeddings.tok_embeddings"
    head_name: ClassVar[str] = "decoder"

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.embedding_norm = self.make_norm(context, f"{prefix}model.embeddings.norm")
        self.kinds = self.settings.layer_types() or self._usual_kinds()
        self.rotary = {kind: self._table(context, kind) for kind in sorted(set(self.kinds))}

    def _usual_kinds(self) -> list[str]:
        every = self.settings.integer("global_attn_every_n_layers", 3)
        kinds = ("sliding_attention", "full_attention")
        return [kinds[index % every == 0] for index in range(self.num_layers())]

    def _table(self, context: BuildContext, kind: str) -> Tensor:
        theta = self.settings.positive(OLD_THETAS[kind], THETAS[kind])
        rope = rope_settings(self.settings.config, kind, theta=theta)
        limit = self.settings.integer("max_position_embeddings", 8192)
        return rotary_table(context, rope, self.settings.head_dim(), max_positions=limit)

    def make_norm(self, context: BuildContext, name: str) -> LayerNorm:
        eps, bias = self.settings.number("norm_eps", 1e-5), self.settings.flag("norm_bias", False)
        return LayerNorm(context, name, self.hidden_size(), eps, bias=bias)

    def make_final_norm(self, context: BuildContext, prefix: str) -> LayerNorm:
        return self.make_norm(context, f"{prefix}model.final_norm")

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        settings, kind = self.settings, self.kinds[index]
        heads, bias = (
            settings.integer("num_attention_heads"),
            settings.flag("attention_bias", False),
        )
        norm = self.make_norm(context, f"{name}.attn_norm") if index else NoNorm()
        return PreNormBlock(
            norm,
            self_attention(
                context,
                f"{name}.attn",
                hidden_size=self.hidden_size(),
                num_heads=heads,
                num_kv_heads=heads,
                head_dim=settings.head_dim(),
                rotary=self.rotary[kind],
                sliding_window=self.window() if kind == "sliding_attention" else None,
                qkv_bias=bias,
                out_bias=bias,
                out_name="Wo",
            ),
            self.make_norm(context, f"{name}.mlp_norm"),
            GatedMLP(
                context,
                f"{name}.mlp",
                self.hidden_size(),
                settings.integer("intermediate_size"),
                settings.activation("hidden_activation", default="gelu"),
                bias=settings.flag("mlp_bias", False),
                stored_fused=True,
                fused_name="Wi",
                down_name="Wo",
            ),
        )

    def window(self) -> int:
        """``local_attention`` counts to both sides, as the encoder looks."""
        return max(1, self.settings.integer("local_attention", 128) // 2)

    def make_head(self, context: BuildContext, prefix: str) -> None:
        size, settings = self.hidden_size(), self.settings
        self.head_activation = settings.activation("classifier_activation", default="gelu")
        self.dense = Linear(
            context,
            f"{prefix}lm_head.dense",
            size,
            [Part(size)],
            bias=settings.flag("classifier_bias", False),
        )
        self.head_norm = self.make_norm(context, f"{prefix}lm_head.norm")
        super().make_head(context, prefix)

    def has_head_bias(self) -> bool:
        return self.settings.flag("decoder_bias", True)

    def embed_tokens(self, batch: ForwardBatch) -> Tensor:
        return self.embedding_norm(self.input_vectors(batch))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        dense = self.dense.activated(hidden, self.head_activation)
        return super().compute_logits(self.head_norm(dense))
