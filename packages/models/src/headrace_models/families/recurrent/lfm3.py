"""LFM3: LFM2 with longer convolutions, windows in half of the layers that attend, a gate for each head, and
norms behind both halves. Liquid AI 2026, LFM3-1.7B.

Block: ``h = x + norm(mixer(norm(x))); h + norm(mlp(norm(h)))``, the mixer being a convolution or attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.recurrent_settings import MAX_TAPS, layer_kinds
from headrace_models.config.rope import rope_settings
from headrace_models.layers.attention.head_gate import HeadGatedAttention
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import Mixer
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import NormLayer
from headrace_models.layers.recurrent.short_conv import ShortConv
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.rules.hybrid import LAYER, LFM_RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

KINDS = ("conv", "sliding_attention", "full_attention")
_ATTENTION = f"{LAYER}.self_attn"
_THETAS = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}


class Lfm3Block(Block):
    """``h = x + norm(mixer(norm(x))); h + norm(mlp(norm(h)))``; the mixer is a convolution or attention."""

    def __init__(
        self,
        input_norm: NormLayer,
        mixer: Mixer,
        mixer_out_norm: NormLayer,
        mlp_norm: NormLayer,
        mlp: MLPLayer,
        mlp_out_norm: NormLayer,
    ) -> None:
        self.input_norm = input_norm
        self.mixer = mixer
        self.mixer_out_norm = mixer_out_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_out_norm = mlp_out_norm

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        x = self.mixer_out_norm(self.mixer(x, batch))
        x, stream = self.mlp_norm.add(x, stream)
        return self.mlp_out_norm(self.mlp(x)), stream


class Lfm3ForCausalLM(LlamaDecoder):
    """LFM3 1.7B."""

    module_names: ClassVar[Sequence[tuple[str, str]]] = (
        (r"\.self_attn\.g_proj$", ".self_attn.gate_proj"),
    )
    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *LFM_RULES,
        WeightRule(f"{_ATTENTION}.o_proj", "layers.{}.mixer.out"),
        WeightRule(f"{_ATTENTION}.q_norm", "layers.{}.mixer.query_norm"),
        WeightRule(f"{_ATTENTION}.k_norm", "layers.{}.mixer.key_norm"),
        WeightRule(f"{_ATTENTION}.gate_proj", "layers.{}.mixer.gate.projection"),
        WeightRule(f"{LAYER}.post_operator_norm", "layers.{}.mixer_out_norm"),
        WeightRule(f"{LAYER}.post_ffn_norm", "layers.{}.mlp_out_norm"),
    )

    ties_embeddings: ClassVar[bool] = True

    def is_tied(self) -> bool:
        """LFM2's early configs say ``tie_embedding``."""
        return self.settings.flag("tie_embedding", super().is_tied())

    def norm_eps(self) -> float:
        return self.settings.number("norm_eps", 1e-5)

    def prepare(self, context: BuildContext, prefix: str) -> None:
        """Half of a head turns in layers that see everything, if the config does not say."""
        self.settings.refuse("use_sandwich_norm", True)
        config, size = self.settings.config, self.head_dim()
        if config.get("rope_parameters") is None:
            full = {"rope_type": "proportional", "partial_rotary_factor": 0.5}
            config = {**config, "rope_parameters": {"full_attention": full}}
        limit = self.settings.integer("max_position_embeddings", 128_000)
        self.tables = {
            kind: rotary_table(
                context, rope_settings(config, kind, theta=theta), size, max_positions=limit
            )
            for kind, theta in _THETAS.items()
        }
        self.rotary = self.tables["full_attention"]

    def kind(self, index: int) -> str:
        """The kind of a layer's mixer; by default every second attends, and every second of these to all."""
        kinds = layer_kinds(self.settings, "layer_types", known=KINDS, count=self.num_layers())
        if kinds is not None:
            return kinds[index]
        if index % 4 == 2:
            return "full_attention"
        return "sliding_attention" if index % 4 == 0 and index > 0 else "conv"

    def make_final_norm(self, context: BuildContext, prefix: str) -> NormLayer:
        return self.make_norm(context, f"{prefix}model.embedding_norm")

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return Lfm3Block(
            self.make_norm(context, f"{name}.operator_norm"),
            self.make_mixer(context, index, name),
            self.make_norm(context, f"{name}.post_operator_norm"),
            self.make_norm(context, f"{name}.ffn_norm"),
            self.make_mlp(context, index, f"{name}.feed_forward"),
            self.make_norm(context, f"{name}.post_ffn_norm"),
        )

    def make_mixer(self, context: BuildContext, index: int, name: str) -> Mixer:
        if self.kind(index) != "conv":
            return self.make_attention(context, index, f"{name}.self_attn")
        taps = self.settings.integer("conv_L_cache", 7, minimum=2, maximum=MAX_TAPS)
        bias = self.settings.flag("conv_bias", False)
        return ShortConv(context, f"{name}.conv", self.hidden_size(), taps, bias=bias)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        self.settings.refuse("use_attention_gate", True)
        kind, bias = self.kind(index), self.settings.flag("attention_bias", False)
        windowed = kind == "sliding_attention"
        return HeadGatedAttention(
            context,
            name,
            hidden_size=self.hidden_size(),
            num_heads=self.settings.integer("num_attention_heads"),
            num_kv_heads=self.settings.num_kv_heads(),
            head_dim=self.head_dim(),
            rotary=self.tables[kind],
            sliding_window=self.settings.integer("sliding_window", 256) if windowed else None,
            head_norm_eps=self.norm_eps(),
            gate_name="gate_proj",
            qkv_bias=bias,
            out_bias=bias,
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        size = self.settings.integer("intermediate_size")
        return GatedMLP(context, name, self.hidden_size(), size, "silu")
