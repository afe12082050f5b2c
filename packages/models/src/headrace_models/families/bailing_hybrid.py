"""Ling 2.5, 2.6 and 3, Ring-linear: attention in one layer of a group, a recurrence in the others, and
mixtures routed as DeepSeek V3's.

Ling Team 2025, arXiv:2510.19338 (linear attention); the recurrence of 3: Kimi Team 2025, arXiv:2510.26692.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.families.bailing_moe import BailingMoeV2ForCausalLM
from headrace_models.families.moe_shape import is_dense_by_list
from headrace_models.layers.alibi import alibi_slopes
from headrace_models.layers.decoder import Block
from headrace_models.layers.delta_net import DeltaSizes, DirectDeltaAttention
from headrace_models.layers.head_gate import HeadGatedLatentAttention
from headrace_models.layers.hybrid_block import HybridBlock, Mixer
from headrace_models.layers.latent_attention import (
    LatentAttention,
    LatentSizes,
    latent_rules,
    latent_scale,
)
from headrace_models.layers.rotary import rotary_table
from headrace_models.layers.rotated_lightning import RotatedLightning, fading_slopes
from headrace_models.mapping import ALL_PARTS
from headrace_models.recurrent_settings import MAX_TAPS, layer_kinds
from headrace_models.rope import rope_settings
from headrace_models.settings import MAX_HEAD_DIM, Spelling

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_LAYER = "model.layers.{}"
_ATTENTION = f"{_LAYER}.attention"
_KINDS = ("linear_attention", "full_attention")
_MIXER = "layers.{}.mixer"
_SHARED_RULES = tuple(
    r for r in BailingMoeV2ForCausalLM.weight_rules if ".attention." not in r.target
)
"""All but the mixers."""
_LIGHTNING_RULES = (
    WeightRule(f"{_ATTENTION}.query_key_value", f"{_MIXER}.inputs", split=ALL_PARTS),
    WeightRule(f"{_ATTENTION}.query_layernorm", f"{_MIXER}.norms.0"),
    WeightRule(f"{_ATTENTION}.key_layernorm", f"{_MIXER}.norms.1"),
    WeightRule(f"{_ATTENTION}.g_proj", f"{_MIXER}.gate"),
    WeightRule(f"{_ATTENTION}.g_norm", f"{_MIXER}.norm"),
    WeightRule(f"{_ATTENTION}.dense", f"{_MIXER}.out_proj"),
)
_LATENT_RULES = (
    *(r for r in latent_rules(_ATTENTION, _MIXER) if not r.source.endswith(".o_proj")),
    WeightRule(f"{_ATTENTION}.dense", f"{_MIXER}.out"),
)


class BailingMoeLinearV2ForCausalLM(BailingMoeV2ForCausalLM):
    """Ring-mini-linear-2.0, Ring-flash-linear-2.0: lightning attention in the layers between."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *_SHARED_RULES,
        *_LIGHTNING_RULES,
        WeightRule(f"{_ATTENTION}.query_key_value", f"{_MIXER}.qkv", split=ALL_PARTS),
        WeightRule(f"{_ATTENTION}.query_layernorm", f"{_MIXER}.query_norm"),
        WeightRule(f"{_ATTENTION}.key_layernorm", f"{_MIXER}.key_norm"),
        WeightRule(f"{_ATTENTION}.dense", f"{_MIXER}.out"),
    )
    spelling: ClassVar[Spelling] = {
        "num_experts": ("num_local_experts",),
        "num_experts_per_tok": ("num_experts_per_token",),
        "num_shared_experts": ("n_shared_experts",),
        "n_group": ("num_expert_group",),
        "norm_topk_prob": ("moe_renormalize",),
        "max_position_embeddings": ("model_max_length",),
    }

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.check()
        super().prepare(context, prefix)

    def check(self) -> None:
        """Raises: UnsupportedModel: the config asks for what the class does not do."""
        self.settings.refuse("score_function", "sigmoid")
        self.settings.refuse("moe_router_enable_expert_bias", True)
        self.settings.refuse("norm_head", False)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return HybridBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_mixer(context, index, f"{name}.attention"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def make_mixer(self, context: BuildContext, index: int, name: str) -> Mixer:
        if self.attends(index):
            return self.make_full(context, index, name)
        return self.make_recurrence(context, index, name)

    def attends(self, index: int) -> bool:
        """Whether the layer's mixer is attention: the last one of a group, and what fills none."""
        count = self.num_layers()
        kinds = layer_kinds(self.settings, "layer_types", known=_KINDS, count=count)
        if kinds is not None:
            return kinds[index] == "full_attention"
        size = self.settings.integer("layer_group_size")
        return (index + 1) % size == 0 or index >= count // size * size

    def is_dense(self, index: int) -> bool:
        return is_dense_by_list(
            self.settings, index, self.settings.integer("first_k_dense_replace", 0, minimum=0)
        )

    def make_full(self, context: BuildContext, index: int, name: str) -> Mixer:
        """Attention."""
        return super().make_attention(context, index, f"{name.removesuffix('attention')}self_attn")

    def make_recurrence(self, context: BuildContext, index: int, name: str) -> Mixer:
        heads = self.settings.integer("num_attention_heads")
        self.settings.refuse("num_kv_heads_for_linear_attn", heads)
        silu = self.settings.flag("linear_silu", self.settings.flag("use_linear_silu", False))
        bias = self.settings.flag("use_bias", False)
        return RotatedLightning(
            context,
            name,
            hidden_size=self.hidden_size(),
            head_dim=self.head_dim(),
            slopes=fading_slopes(alibi_slopes(heads), index, self.num_layers()),
            rotary=self.rotary if self.settings.flag("linear_rope", True) else None,
            norm_eps=self.norm_eps(),
            norm_groups=self.settings.integer("group_norm_size", 1),
            normed=self.settings.flag("use_qk_norm", True),
            activation="silu" if silu else None,
            qkv_bias=bias or self.settings.flag("use_qkv_bias", False),
            out_bias=bias,
        )


class BailingMoeV2_5ForCausalLM(BailingMoeLinearV2ForCausalLM):
    """Ling-2.5-1T, Ring-2.5-1T, Ling-2.6: the layers that attend do so latently."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *_SHARED_RULES,
        *_LIGHTNING_RULES,
        *_LATENT_RULES,
    )

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        self.prepare_latent(context)

    def prepare_latent(self, context: BuildContext) -> None:
        """What configs say of parts of heads that turn is of the linear attention."""
        rope = rope_settings(self.settings.config, theta=self.default_theta)
        self.latent_rope = replace(rope, partial_rotary_factor=1.0)
        size, limit = self._latent_size("qk_rope_head_dim", 64), context.max_model_len
        self.latent_rotary = rotary_table(context, self.latent_rope, size, max_positions=limit)

    def _latent_size(self, name: str, default: int) -> int:
        return self.settings.integer(name, default, maximum=MAX_HEAD_DIM)

    def latent_sizes(self) -> LatentSizes:
        return LatentSizes(
            hidden_size=self.hidden_size(),
            num_heads=self.settings.integer("num_attention_heads"),
            q_lora_rank=self.settings.optional_integer("q_lora_rank"),
            kv_lora_rank=self._latent_size("kv_lora_rank", 512),
            nope_head_dim=self._latent_size("qk_nope_head_dim", 128),
            rope_head_dim=self._latent_size("qk_rope_head_dim", 64),
            v_head_dim=self._latent_size("v_head_dim", 128),
        )

    def make_full(self, context: BuildContext, index: int, name: str) -> Mixer:
        return self.latent_attention(context, name, LatentAttention)

    def latent_attention(
        self, context: BuildContext, name: str, kind: type[LatentAttention]
    ) -> LatentAttention:
        """A layer of the config's sizes."""
        sizes = self.latent_sizes()
        return kind(
            context,
            name,
            sizes,
            rotary=self.latent_rotary,
            interleaved=self.settings.flag("rope_interleave", True),
            scale=latent_scale(self.latent_rope, sizes.nope_head_dim + sizes.rope_head_dim),
        )


class BailingHybridForCausalLM(BailingMoeV2_5ForCausalLM):
    """Ling 3: Kimi's delta attention in the layers between, a gate for each latent head."""

    default_theta: ClassVar[float] = 6_000_000.0
    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *_SHARED_RULES,
        *_LATENT_RULES,
        WeightRule(f"{_ATTENTION}.g_proj", f"{_MIXER}.gate.projection"),
        *(
            WeightRule(f"{_ATTENTION}.{name}_proj", f"{_MIXER}.inputs", part=part)
            for part, name in enumerate("qkvfg")
        ),
        *(
            WeightRule(f"{_ATTENTION}.{name}_conv1d", f"{_MIXER}.conv", part=part)
            for part, name in enumerate("qkv")
        ),
        WeightRule(f"{_ATTENTION}.b_proj", f"{_MIXER}.beta"),
        WeightRule(f"{_ATTENTION}.A_log", f"{_MIXER}.rule.A_log"),
        WeightRule(f"{_ATTENTION}.dt_bias", f"{_MIXER}.rule.dt_bias"),
        WeightRule(f"{_ATTENTION}.o_norm", f"{_MIXER}.norm"),
        WeightRule(f"{_ATTENTION}.o_proj", f"{_MIXER}.out_proj"),
        WeightRule(f"{_ATTENTION}.dense", f"{_MIXER}.out_proj"),  # as transformers writes it
    )

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.check()
        self.rotary = None
        self.prepare_latent(context)

    def check(self) -> None:
        super().check()
        self.settings.refuse("no_kda_lora", True)
        self.settings.refuse("gated_attention_proj_granularity_type", "head_wise")
        self.settings.refuse("use_mla_nope", False)

    def make_full(self, context: BuildContext, index: int, name: str) -> Mixer:
        return self.latent_attention(context, name, HeadGatedLatentAttention)

    def make_recurrence(self, context: BuildContext, index: int, name: str) -> Mixer:
        """transformers writes the latent heads' size where published configs have that of these."""
        heads = self.settings.integer("num_attention_heads")
        size = self.settings.integer("linear_head_dim", self.head_dim(), maximum=MAX_HEAD_DIM)
        taps = self.settings.integer("short_conv_kernel_size", 4, maximum=MAX_TAPS)
        return DirectDeltaAttention(
            context,
            name,
            DeltaSizes(self.hidden_size(), heads, heads, size, size, taps),
            activation=self.settings.activation("hidden_act", default="silu"),
            norm_eps=self.norm_eps(),
            lower_bound=self._lower_bound(),
        )

    def _lower_bound(self) -> float | None:
        if not self.settings.flag("kda_safe_gate", True):
            return None
        bound = self.settings.number("kda_lower_bound", -5.0)
        if bound >= 0:
            raise UnsupportedModel(
                f"config.json: kda_lower_bound = {bound}: must be a number below 0"
            )
        return bound
