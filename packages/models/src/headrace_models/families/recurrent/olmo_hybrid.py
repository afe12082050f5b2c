"""OLMo hybrid: three gated delta nets to one layer of attention, whose norms lie behind both halves. Ai2
2026.

Block: ``h = x + delta_net(norm(x)); h + mlp(norm(h))``, or
``h = x + norm(attention(x)); h + norm(mlp(h))``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.recurrent_settings import MAX_TAPS, layer_kinds
from headrace_models.config.rope import scaling_block
from headrace_models.config.settings import MAX_HEAD_DIM
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import HybridBlock, PostNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder, whole_norms
from headrace_models.layers.recurrent.delta_net import DeltaSizes, GatedDeltaNet
from headrace_models.loading.mapping import ALL_PARTS
from headrace_models.loading.rules.hybrid import LAYER

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_DELTA, _ATTENTION, _MLP = f"{LAYER}.linear_attn", f"{LAYER}.self_attn", f"{LAYER}.mlp"
_NORM_EPS = 1e-5
"""Epsilon of the norm behind the delta rule; the config's value is ignored."""


class OlmoHybridForCausalLM(LlamaDecoder):
    """OLMo hybrid 7B. Without a rotary base in the config nothing turns."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("model.embed_tokens", "embed"),
        WeightRule(f"{LAYER}.input_layernorm", "layers.{}.input_norm"),
        WeightRule(f"{LAYER}.attention_layer_norm", "layers.{}.input_norm"),
        *(
            WeightRule(f"{_DELTA}.{name}_proj", "layers.{}.mixer.inputs", part=part)
            for part, name in enumerate("qkvg")
        ),
        WeightRule(f"{_DELTA}.b_proj", "layers.{}.mixer.gates", part=0),
        WeightRule(f"{_DELTA}.a_proj", "layers.{}.mixer.gates", part=1),
        *(
            WeightRule(f"{_DELTA}.{name}_conv1d", "layers.{}.mixer.conv", part=part)
            for part, name in enumerate("qkv")
        ),
        WeightRule(f"{_DELTA}.conv1d", "layers.{}.mixer.conv", split=ALL_PARTS),
        WeightRule(f"{_DELTA}.A_log", "layers.{}.mixer.rule.A_log"),
        WeightRule(f"{_DELTA}.dt_bias", "layers.{}.mixer.rule.dt_bias"),
        WeightRule(f"{_DELTA}.o_norm", "layers.{}.mixer.norm"),
        WeightRule(f"{_DELTA}.o_proj", "layers.{}.mixer.out_proj"),
        WeightRule(f"{LAYER}.post_attention_layernorm", "layers.{}.mlp_norm"),
        WeightRule(f"{LAYER}.feedforward_layer_norm", "layers.{}.mlp_norm"),
        *(
            WeightRule(f"{_ATTENTION}.{name}_proj", "layers.{}.attention.qkv", part=part)
            for part, name in enumerate("qkv")
        ),
        WeightRule(f"{_ATTENTION}.o_proj", "layers.{}.attention.out"),
        WeightRule(f"{_ATTENTION}.q_norm", "layers.{}.attention.query_norm"),
        WeightRule(f"{_ATTENTION}.k_norm", "layers.{}.attention.key_norm"),
        WeightRule(f"{LAYER}.post_attention_layernorm", "layers.{}.attention_out_norm"),
        # transformers renames it with those of the other layers when it saves.
        WeightRule(f"{LAYER}.feedforward_layer_norm", "layers.{}.attention_out_norm"),
        WeightRule(f"{LAYER}.post_feedforward_layernorm", "layers.{}.mlp_out_norm"),
        WeightRule(f"{_MLP}.gate_proj", "layers.{}.mlp.gate_up", part=0),
        WeightRule(f"{_MLP}.up_proj", "layers.{}.mlp.gate_up", part=1),
        WeightRule(f"{_MLP}.down_proj", "layers.{}.mlp.down"),
        WeightRule("model.norm", "final_norm"),
        WeightRule("lm_head", "head"),
    )
    ignored_weights: ClassVar[Mapping[str, str]] = {r"mtp\..*": "predicts several tokens at once"}

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.rotary = None
        block = scaling_block(context.config)
        if block.get("rope_theta", context.config.get("rope_theta")) is not None:
            super().prepare(context, prefix)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        mlp = self.make_mlp(context, index, f"{name}.mlp")
        behind = self.make_norm(context, f"{name}.post_attention_layernorm")
        if not self.attends(index):
            norm = self.make_norm(context, f"{name}.input_layernorm")
            return HybridBlock(norm, self.make_delta(context, f"{name}.linear_attn"), behind, mlp)
        return PostNormBlock(
            context.ops,
            self.make_attention(context, index, f"{name}.self_attn"),
            behind,
            mlp,
            self.make_norm(context, f"{name}.post_feedforward_layernorm"),
        )

    def attends(self, index: int) -> bool:
        """True if the layer's mixer is attention."""
        count = self.num_layers()
        known = ("linear_attention", "full_attention")
        kinds = layer_kinds(self.settings, "layer_types", known=known, count=count)
        if kinds is not None:
            return kinds[index] == "full_attention"
        return index % 4 == 3 or (count < 4 and index == count - 1)

    def make_delta(self, context: BuildContext, name: str) -> GatedDeltaNet:
        hidden, heads = self.hidden_size(), self.settings.integer("num_attention_heads")
        key_heads = self.settings.integer("linear_num_key_heads", heads)
        size = self.settings.integer("linear_key_head_dim", int(0.75 * hidden / key_heads))
        sizes = DeltaSizes(
            hidden_size=hidden,
            num_key_heads=key_heads,
            num_value_heads=self.settings.integer("linear_num_value_heads", heads),
            key_dim=size,
            value_dim=self.settings.integer(
                "linear_value_head_dim", 2 * size, maximum=MAX_HEAD_DIM
            ),
            taps=self.settings.integer("linear_conv_kernel_dim", 4, maximum=MAX_TAPS),
        )
        return GatedDeltaNet(
            context,
            name,
            sizes,
            activation=self.settings.activation("hidden_act"),
            norm_eps=_NORM_EPS,
            norm_name="o_norm",
            out_name="o_proj",
            beta_scale=2.0 if self.settings.flag("linear_allow_neg_eigval", True) else 1.0,
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        return self.attention(
            context,
            name,
            qkv_bias=bias,
            out_bias=bias,
            **whole_norms(self, context, name),
        )
