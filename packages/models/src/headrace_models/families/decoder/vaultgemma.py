"""VaultGemma: Gemma 2 without the norms behind both halves. Sinha et al. 2025, arXiv:2510.15001."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.gemma import embedding_scale
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import RMSNorm
from headrace_models.loading.rules.llama import RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class VaultGemmaForCausalLM(LlamaDecoder):
    """VaultGemma 1B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(rule for rule in RULES if not rule.target.endswith("mlp_norm")),
        WeightRule("model.layers.{}.pre_feedforward_layernorm", "layers.{}.mlp_norm"),
    )
    ties_embeddings: ClassVar[bool] = True

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        super().__init__(context, prefix)
        self.embed_scale = embedding_scale(context, self.hidden_size())

    def head_dim(self) -> int:
        return self.settings.head_dim(default=256)

    def make_norm(self, context: BuildContext, name: str) -> RMSNorm:
        """Stored less 1."""
        return RMSNorm(context, name, self.hidden_size(), self.norm_eps(), offset=1.0)

    def token_vectors(self, ids: Tensor) -> Tensor:
        return self.context.ops.scale(self.embed(ids), self.embed_scale)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return PreNormBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.pre_feedforward_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def is_sliding(self, index: int) -> bool:
        kinds = self.settings.layer_types()
        return index % 2 == 0 if kinds is None else kinds[index] == "sliding_attention"

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        window = self.settings.optional_integer("sliding_window")
        return self.attention(
            context,
            name,
            scale=self.settings.positive("query_pre_attn_scalar", 256) ** -0.5,
            sliding_window=window if self.is_sliding(index) else None,
            soft_cap=self.settings.optional_positive("attn_logit_softcapping") or 0.0,
            qkv_bias=bias,
            out_bias=bias,
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_activation", "hidden_act"),
        )
