"""LFM2: gated convolutions over three tokens, with some layers of attention. Liquid AI 2025,
arXiv:2511.23404.

Block: ``h = x + mixer(norm(x)); h + mlp(norm(h))``, the mixer being a convolution or attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.recurrent_settings import MAX_TAPS, layer_kinds
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import HybridBlock, Mixer
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.layers.norm import NormLayer
from headrace_models.layers.recurrent.short_conv import ShortConv
from headrace_models.loading.rules.hybrid import LAYER, LFM_RULES
from headrace_models.loading.rules.moe import EXPERT_NAMES, expert_rules, router_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_MLP = f"{LAYER}.feed_forward"

_RULES = (
    *LFM_RULES,
    WeightRule(f"{LAYER}.self_attn.out_proj", "layers.{}.mixer.out"),
    WeightRule(f"{LAYER}.self_attn.q_layernorm", "layers.{}.mixer.query_norm"),
    WeightRule(f"{LAYER}.self_attn.k_layernorm", "layers.{}.mixer.key_norm"),
)


class Lfm2ForCausalLM(LlamaDecoder):
    """LFM2 350M to 2.6B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = _RULES
    ties_embeddings: ClassVar[bool] = True
    default_theta: ClassVar[float] = 1_000_000.0

    def is_tied(self) -> bool:
        """Early configs say ``tie_embedding``."""
        return self.settings.flag("tie_embedding", super().is_tied())

    def norm_eps(self) -> float:
        return self.settings.number("norm_eps", 1e-5)

    def make_final_norm(self, context: BuildContext, prefix: str) -> NormLayer:
        return self.make_norm(context, f"{prefix}model.embedding_norm")

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return HybridBlock(
            self.make_norm(context, f"{name}.operator_norm"),
            self.make_mixer(context, index, name),
            self.make_norm(context, f"{name}.ffn_norm"),
            self.make_mlp(context, index, f"{name}.feed_forward"),
        )

    def make_mixer(self, context: BuildContext, index: int, name: str) -> Mixer:
        if self.attends(index):
            return self.make_attention(context, index, f"{name}.self_attn")
        taps = self.settings.integer("conv_L_cache", 3, minimum=2, maximum=MAX_TAPS)
        bias = self.settings.flag("conv_bias", False)
        return ShortConv(context, f"{name}.conv", self.hidden_size(), taps, bias=bias)

    def attends(self, index: int) -> bool:
        """True if the layer's mixer is attention."""
        known = ("conv", "full_attention")
        kinds = layer_kinds(self.settings, "layer_types", known=known, count=self.num_layers())
        if kinds is not None:
            return kinds[index] == "full_attention"
        listed = self.context.config.get("full_attn_idxs") is not None
        return not listed or index in self.settings.integers("full_attn_idxs")

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.attention(context, name, head_norm_eps=self.norm_eps(), out_name="out_proj")

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return GatedMLP(context, name, self.hidden_size(), self.intermediate_size(), "silu")

    def intermediate_size(self) -> int:
        """The config's number, or two thirds of it, rounded up."""
        size = self.settings.integer("block_ff_dim", self.settings.integer("intermediate_size", 1))
        if not self.settings.flag("block_auto_adjust_ff_dim", True):
            return size
        multiple = self.settings.integer("block_multiple_of", 256)
        scaled = int(self.settings.positive("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        return -(-scaled // multiple) * multiple


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2 8B-A1B: mixtures of experts behind the first layers."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *_RULES,
        *router_rules(f"{_MLP}.gate", f"{_MLP}.expert_bias"),
        *expert_rules(f"{_MLP}.experts", names=EXPERT_NAMES),
    )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        hidden = self.hidden_size()
        if index < self.settings.integer("num_dense_layers", 2, minimum=0):
            size = self.settings.integer("intermediate_size")
            return GatedMLP(context, name, hidden, size, "silu")
        return SparseMoE(
            context,
            name,
            hidden_size=hidden,
            intermediate_size=self.settings.integer("moe_intermediate_size"),
            routing=Routing(
                num_experts=self.settings.integer("num_experts", 32, maximum=MAX_EXPERTS),
                top_k=self.settings.integer("num_experts_per_tok", 4),
                scoring="sigmoid",
                renormalise=self.settings.flag("norm_topk_prob", True),
                scale=self.settings.positive("routed_scaling_factor", 1.0),
            ),
            activation="silu",
            expert_names=EXPERT_NAMES,
            corrected=self.settings.flag("use_expert_bias", True),
        )
