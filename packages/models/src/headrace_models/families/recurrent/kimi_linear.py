"""Kimi Linear: three layers of delta attention, with a decay for each channel, to one of latent attention
without positions, and mixtures of experts. Kimi Team 2025, arXiv:2510.26692.

Block: ``h = x + mixer(norm(x)); h + mlp(norm(h))``, the mixer being delta or latent attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.recurrent_settings import MAX_TAPS, layer_kinds
from headrace_models.config.settings import MAX_EXPERTS, MAX_HEAD_DIM, Settings
from headrace_models.layers.attention.mla import MLAAttention, MLASizes, mla_rules
from headrace_models.layers.blocks import HybridBlock, Mixer
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.layers.recurrent.delta_net import DeltaSizes, KimiDeltaAttention
from headrace_models.loading.mapping import ALL_PARTS
from headrace_models.loading.rules.hybrid import LAYER
from headrace_models.loading.rules.moe import EXPERT_NAMES, expert_rules, router_rules, shared_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_MIXER, _MOE = f"{LAYER}.self_attn", f"{LAYER}.block_sparse_moe"
_LATENT_EPS = 1e-6
"""Epsilon of the norm of the latents; the config's value is ignored."""


class KimiLinearForCausalLM(LlamaDecoder):
    """Kimi Linear 48B-A3B."""

    module_names: ClassVar[Sequence[tuple[str, str]]] = (
        (r"\.forget_gate\.", "."),
        (r"\.mlp\.shared_experts\.", ".block_sparse_moe.shared_experts."),
    )
    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("model.embed_tokens", "embed"),
        WeightRule(f"{LAYER}.input_layernorm", "layers.{}.input_norm"),
        *mla_rules(_MIXER, "layers.{}.mixer"),
        *(
            WeightRule(f"{_MIXER}.{name}_proj", "layers.{}.mixer.inputs", part=part)
            for part, name in enumerate("qkv")
        ),
        *(
            WeightRule(f"{_MIXER}.{name}_conv1d", "layers.{}.mixer.conv", part=part)
            for part, name in enumerate("qkv")
        ),
        WeightRule(f"{_MIXER}.conv1d", "layers.{}.mixer.conv", split=ALL_PARTS),
        WeightRule(f"{_MIXER}.f_a_proj", "layers.{}.mixer.down", part=0),
        WeightRule(f"{_MIXER}.g_a_proj", "layers.{}.mixer.down", part=1),
        WeightRule(f"{_MIXER}.f_b_proj", "layers.{}.mixer.decay"),
        WeightRule(f"{_MIXER}.g_b_proj", "layers.{}.mixer.gate"),
        WeightRule(f"{_MIXER}.b_proj", "layers.{}.mixer.beta"),
        WeightRule(f"{_MIXER}.A_log", "layers.{}.mixer.rule.A_log"),
        WeightRule(f"{_MIXER}.dt_bias", "layers.{}.mixer.rule.dt_bias"),
        WeightRule(f"{_MIXER}.o_norm", "layers.{}.mixer.norm"),
        WeightRule(f"{_MIXER}.o_proj", "layers.{}.mixer.out_proj"),
        WeightRule(f"{LAYER}.post_attention_layernorm", "layers.{}.mlp_norm"),
        *shared_rules(f"{LAYER}.mlp", "layers.{}.mlp"),
        *shared_rules(_MOE, "layers.{}.mlp"),  # as transformers 5 writes dense layers too
        *router_rules(f"{_MOE}.gate", f"{_MOE}.gate.e_score_correction_bias"),
        *expert_rules(f"{_MOE}.experts", names=EXPERT_NAMES),
        *shared_rules(f"{_MOE}.shared_experts"),
        WeightRule("model.norm", "final_norm"),
        WeightRule("lm_head", "head"),
    )
    default_eps: ClassVar[float] = 1e-5

    def prepare(self, context: BuildContext, prefix: str) -> None:
        """Nothing turns; the published config has what concerns delta attention in an object."""
        self.settings.refuse("mla_use_nope", True)
        self.settings.refuse("moe_router_activation_func", "sigmoid")
        self.settings.refuse("moe_layer_freq", 1)
        own = context.config.get("linear_attn_config") or {}
        if not isinstance(own, Mapping):
            raise UnsupportedModel(
                f"config.json: linear_attn_config = {own!r:.200}: must be an object"
            )
        self.delta = Settings(own)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return HybridBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_mixer(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, name),
        )

    def make_mixer(self, context: BuildContext, index: int, name: str) -> Mixer:
        if self.attends(index):
            return self.make_latent(context, name)
        heads = self._of_delta("num_heads", "linear_num_heads", 32)
        size = self._of_delta("head_dim", "linear_head_dim", 128, maximum=MAX_HEAD_DIM)
        taps = self._of_delta(
            "short_conv_kernel_size", "linear_conv_kernel_dim", 4, maximum=MAX_TAPS
        )
        return KimiDeltaAttention(
            context,
            name,
            DeltaSizes(self.hidden_size(), heads, heads, size, size, taps),
            activation=self.settings.activation("hidden_act"),
            norm_eps=self.norm_eps(),
        )

    def attends(self, index: int) -> bool:
        """True if the layer's mixer is latent attention. Published configs count from 1."""
        known = ("linear_attention", "full_attention")
        kinds = layer_kinds(self.settings, "layer_types", known=known, count=self.num_layers())
        if kinds is not None:
            return kinds[index] == "full_attention"
        if self.delta.config.get("full_attn_layers") is not None:
            return index + 1 in self.delta.integers("full_attn_layers")
        return index > 0 and index % 4 == 0

    def make_latent(self, context: BuildContext, name: str) -> MLAAttention:
        bias = self.settings.flag("attention_bias", False)
        sizes = MLASizes(
            hidden_size=self.hidden_size(),
            num_heads=self.settings.integer("num_attention_heads"),
            q_lora_rank=self.settings.optional_integer("q_lora_rank"),
            kv_lora_rank=self.settings.integer("kv_lora_rank", 512),
            nope_head_dim=self.settings.integer("qk_nope_head_dim", 128),
            rope_head_dim=self.settings.integer("qk_rope_head_dim", 64),
            v_head_dim=self.settings.integer("v_head_dim", 128),
        )
        return MLAAttention(
            context, name, sizes, rotary=None, norm_eps=_LATENT_EPS, bias=bias, out_bias=bias
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        if self.is_dense(index):
            return super().make_mlp(context, index, f"{name}.mlp")
        hidden, inner = self.hidden_size(), self.settings.integer("moe_intermediate_size", 1024)
        activation, mixture = self.settings.activation("hidden_act"), f"{name}.block_sparse_moe"
        shared = inner * self._named("num_shared_experts", "n_shared_experts", 1)
        return SparseMoE(
            context,
            mixture,
            hidden_size=hidden,
            intermediate_size=inner,
            routing=Routing(
                num_experts=self._named(
                    "num_experts", "num_local_experts", 256, maximum=MAX_EXPERTS
                ),
                top_k=self._named("num_experts_per_token", "num_experts_per_tok", 8),
                scoring="sigmoid",
                renormalise=self.settings.flag(
                    "moe_renormalize", self.settings.flag("norm_topk_prob", True)
                ),
                scale=self.settings.positive("routed_scaling_factor", 2.446),
                num_groups=self._named("num_expert_group", "n_group", 1),
                top_groups=self.settings.integer("topk_group", 1),
                group_score="top2",
            ),
            activation=activation,
            expert_names=EXPERT_NAMES,
            corrected=True,
            exact_router=True,
            shared=GatedMLP(context, f"{mixture}.shared_experts", hidden, shared, activation),
        )

    def is_dense(self, index: int) -> bool:
        """True if the layer has an ordinary MLP."""
        known, count = ("dense", "sparse"), self.num_layers()
        kinds = layer_kinds(self.settings, "mlp_layer_types", known=known, count=count)
        if kinds is not None:
            return kinds[index] == "dense"
        return index < self.settings.integer("first_k_dense_replace", 1, minimum=0)

    def _of_delta(self, published: str, name: str, default: int, **limits: Any) -> int:
        """A number of the object for delta attention, or of the config itself."""
        return self.delta.integer(
            published, self.settings.integer(name, default, **limits), **limits
        )

    def _named(self, published: str, name: str, default: int, **limits: Any) -> int:
        """A number under the published name, or under that of transformers."""
        return self.settings.integer(
            published, self.settings.integer(name, default, **limits), **limits
        )
