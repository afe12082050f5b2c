"""Ling 2.5, 2.6 and 3, Ring-linear: attention in one layer of a group, a recurrence in the others, and
mixtures of experts routed as DeepSeek V3's.

Attention is Ling 2's in Ring-linear and latent (MLA) from Ling 2.5 on; the recurrence is lightning attention
with rotated and normed queries and keys (Ling Team 2025, arXiv:2510.19338), and Kimi's delta attention in
Ling 3 (Kimi Team 2025, arXiv:2510.26692).

Block: ``h = x + mixer(norm(x)); h + experts(norm(h))``.

Letters: T tokens, H heads of this rank, D head size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.kv import StateShape
from headrace_core.model import WeightRule
from headrace_models.config.recurrent_settings import MAX_TAPS, layer_kinds
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import MAX_HEAD_DIM, Spelling
from headrace_models.layers.attention.alibi import alibi_slopes
from headrace_models.layers.attention.head_gate import HeadGatedMLA
from headrace_models.layers.attention.mla import (
    MLAAttention,
    MLASizes,
    mla_rules,
    mla_scale,
)
from headrace_models.layers.base import Part
from headrace_models.layers.blocks import HybridBlock, Mixer
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.decoders.moe import CORRECTED, deepseek_routing, is_dense_by_list
from headrace_models.layers.head_view import by_heads, in_rows
from headrace_models.layers.linear import column_parallel, dividing_shard, row_parallel
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.recurrent.delta_net import DeltaSizes, DirectDeltaAttention
from headrace_models.layers.recurrent.gated_norm import GatedRMSNorm
from headrace_models.layers.recurrent.state_layer import RecurrentLayer
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.further_layers import further_layers
from headrace_models.loading.mapping import ALL_PARTS
from headrace_models.loading.rules.llama import RULES
from headrace_models.loading.rules.moe import expert_rules, router_rules, shared_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

_LAYER = "model.layers.{}"
_ATTENTION = f"{_LAYER}.attention"
_KINDS = ("linear_attention", "full_attention")
_MIXER = "layers.{}.mixer"
_SHARED_RULES = (
    *(r for r in RULES if ".attention." not in r.target and r.target != "embed"),
    WeightRule("model.word_embeddings", "embed"),
    *router_rules(correction=f"{_LAYER}.mlp.gate.expert_bias"),
    *expert_rules(),
    *shared_rules(),
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
_MLA_RULES = (
    *(r for r in mla_rules(_ATTENTION, _MIXER) if not r.source.endswith(".o_proj")),
    WeightRule(f"{_ATTENTION}.dense", f"{_MIXER}.out"),
)


class RotatedLightning(RecurrentLayer):
    """``dense(norm(attention) * sigmoid(gate(x)))``; what a head keeps fades at a rate of its own.

    Args:
        slopes: [heads] float32 of all ranks: what is kept of a token loses that much of its logarithm with
            each further one.
        rotary: [P, R] or None, as
            :class:`~headrace_models.layers.attention.self_attention.ProjectedAttention`'s.
        norm_groups: of the norm behind the attention, equal parts of all channels.
        normed: True: queries and keys have norms.
        activation: of queries, keys and values, or None.
        qkv_bias, out_bias: of the first projection and the last.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        head_dim: int,
        slopes: Tensor,
        rotary: Tensor | None,
        norm_eps: float,
        norm_groups: int,
        normed: bool,
        activation: str | None,
        qkv_bias: bool,
        out_bias: bool,
    ) -> None:
        num_heads = slopes.shape[0]
        shard = dividing_shard(num_heads, context.communicator, what=f"{name}, heads")
        size, own = num_heads * head_dim, num_heads // shard.count
        super().__init__(context, name, (StateShape((own, head_dim, head_dim), "float32"),))
        self.ops, self.head_dim, self.rotary = context.ops, head_dim, rotary
        self.activation = activation
        self.inputs = column_parallel(
            context,
            f"{name}.query_key_value",
            hidden_size,
            (size,) * 3,
            units=(num_heads,) * 3,
            bias=qkv_bias,
        )
        self.norms: list[RMSNorm] = []
        if normed:
            self.norms = [
                RMSNorm(context, f"{name}.{which}_layernorm", head_dim, norm_eps)
                for which in ("query", "key")
            ]
        self.gate = column_parallel(
            context, f"{name}.g_proj", hidden_size, (size,), units=(num_heads,)
        )
        self.norm = GatedRMSNorm(
            context,
            f"{name}.g_norm",
            Part(size // shard.count, shard),
            norm_eps,
            groups=norm_groups,
            norm_first=True,
            activation="sigmoid",
        )
        self.out_proj = row_parallel(context, f"{name}.dense", size, hidden_size, bias=out_bias)
        self.rates = -slopes.chunk(shard.count)[shard.index].to(context.device)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        inputs = self.inputs(x)
        if self.activation is not None:
            inputs = self.ops.activation(inputs, self.activation)
        query, key, value = (by_heads(part, self.head_dim) for part in inputs.chunk(3, -1))
        if self.norms:
            query, key = (norm(part) for norm, part in zip(self.norms, (query, key)))
        if self.rotary is not None:
            self.ops.rotary(query, key, batch.positions, self.rotary, interleaved=False)
        query = by_heads(self.ops.scale(in_rows(query), self.head_dim**-0.5), self.head_dim)
        out = self.ops.state_space_scan(
            value, None, self.rates, key, query, None, *self.state(0, batch)
        )
        return self.out_proj(self.norm(in_rows(out), self.gate(x)))


def fading_slopes(slopes: Tensor, index: int, num_layers: int) -> Tensor:
    """The slopes of layer ``index``: deeper layers forget more slowly. As the published code counts, whose
    first layer forgets faster than at the full rate."""
    return slopes * (1 - (index - 1) / max(1, num_layers - 1) + 1e-5)


class HybridDecoder(LlamaDecoder):
    """The stack of all three: families say which attention and which recurrence it has."""

    embedding_name: ClassVar[str] = "model.word_embeddings"
    default_theta: ClassVar[float] = 600_000.0
    default_partial_rotary: ClassVar[float] = 0.5
    spelling: ClassVar[Spelling] = {
        "num_experts": ("num_local_experts",),
        "num_experts_per_tok": ("num_experts_per_token",),
        "num_shared_experts": ("n_shared_experts",),
        "n_group": ("num_expert_group",),
        "norm_topk_prob": ("moe_renormalize",),
        "max_position_embeddings": ("model_max_length",),
    }

    @property
    def ignored_weights(self) -> Mapping[str, str]:
        """See :class:`headrace_core.model.IgnoresWeights`."""
        return further_layers(self.settings, self.num_layers())

    def check(self) -> None:
        """Raises: UnsupportedModel: the config asks for what the class does not do."""
        self.settings.refuse("score_function", "sigmoid")
        self.settings.refuse("moe_router_enable_expert_bias", True)
        self.settings.refuse("norm_head", False)

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.check()
        super().prepare(context, prefix)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        make_mixer = self.make_full if self.attends(index) else self.make_recurrence
        return HybridBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            make_mixer(context, index, f"{name}.attention"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def attends(self, index: int) -> bool:
        """True if the layer's mixer is attention: the last one of a group, and what fills none."""
        count = self.num_layers()
        kinds = layer_kinds(self.settings, "layer_types", known=_KINDS, count=count)
        if kinds is not None:
            return kinds[index] == "full_attention"
        size = self.settings.integer("layer_group_size")
        return (index + 1) % size == 0 or index >= count // size * size

    @abstractmethod
    def make_full(self, context: BuildContext, index: int, name: str) -> Mixer:
        """Attention."""

    @abstractmethod
    def make_recurrence(self, context: BuildContext, index: int, name: str) -> Mixer:
        """The mixer of the layers between."""

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        first_dense = self.settings.integer("first_k_dense_replace", 0, minimum=0)
        if is_dense_by_list(self.settings, index, first_dense):
            return super().make_mlp(context, index, name)
        hidden, activation = self.hidden_size(), self.settings.activation("hidden_act")
        size = self.settings.integer("moe_intermediate_size")
        shared = self.settings.integer("moe_shared_expert_intermediate_size", size)
        shared *= self.settings.integer("num_shared_experts", 0, minimum=0)
        return SparseMoE(
            context,
            name,
            hidden_size=hidden,
            intermediate_size=size,
            routing=deepseek_routing(self.settings, experts="num_experts"),
            activation=activation,
            shared=GatedMLP(context, f"{name}.shared_experts", hidden, shared, activation)
            if shared
            else None,
            **CORRECTED,
        )


def lightning_attention(
    decoder: HybridDecoder, context: BuildContext, index: int, name: str
) -> RotatedLightning:
    """A layer of the config's sizes: Ring-linear, Ling 2.5."""
    settings = decoder.settings
    heads = settings.integer("num_attention_heads")
    settings.refuse("num_kv_heads_for_linear_attn", heads)
    silu = settings.flag("linear_silu", settings.flag("use_linear_silu", False))
    bias = settings.flag("use_bias", False)
    return RotatedLightning(
        context,
        name,
        hidden_size=decoder.hidden_size(),
        head_dim=decoder.head_dim(),
        slopes=fading_slopes(alibi_slopes(heads), index, decoder.num_layers()),
        rotary=decoder.rotary if settings.flag("linear_rope", True) else None,
        norm_eps=decoder.norm_eps(),
        norm_groups=settings.integer("group_norm_size", 1),
        normed=settings.flag("use_qk_norm", True),
        activation="silu" if silu else None,
        qkv_bias=bias or settings.flag("use_qkv_bias", False),
        out_bias=bias,
    )


class Latent:
    """Latent attention of the config's sizes, and the rotary table that its layers share: Ling 2.5 and 3.

    The share of a head that turns, as configs have it, is the lightning attention's: the part of a latent
    head that is there for it turns as a whole.
    """

    def __init__(self, context: BuildContext, decoder: HybridDecoder) -> None:
        settings = decoder.settings

        def size(key: str, default: int) -> int:
            return settings.integer(key, default, maximum=MAX_HEAD_DIM)

        self.sizes = MLASizes(
            hidden_size=decoder.hidden_size(),
            num_heads=settings.integer("num_attention_heads"),
            q_lora_rank=settings.optional_integer("q_lora_rank"),
            kv_lora_rank=size("kv_lora_rank", 512),
            nope_head_dim=size("qk_nope_head_dim", 128),
            rope_head_dim=size("qk_rope_head_dim", 64),
            v_head_dim=size("v_head_dim", 128),
        )
        rope = rope_settings(settings.config, theta=decoder.default_theta)
        self.rope = replace(rope, partial_rotary_factor=1.0)
        turning, limit = self.sizes.rope_head_dim, context.max_model_len
        self.rotary = rotary_table(context, self.rope, turning, max_positions=limit)
        self.interleaved = settings.flag("rope_interleave", True)

    def attention(self, context: BuildContext, name: str, kind: type[MLAAttention]) -> MLAAttention:
        return kind(
            context,
            name,
            self.sizes,
            rotary=self.rotary,
            interleaved=self.interleaved,
            scale=mla_scale(self.rope, self.sizes.nope_head_dim + self.sizes.rope_head_dim),
        )


class BailingMoeLinearV2ForCausalLM(HybridDecoder):
    """Ring-mini-linear-2.0, Ring-flash-linear-2.0: lightning attention in the layers between."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *_SHARED_RULES,
        *_LIGHTNING_RULES,
        WeightRule(f"{_ATTENTION}.query_key_value", f"{_MIXER}.qkv", split=ALL_PARTS),
        WeightRule(f"{_ATTENTION}.query_layernorm", f"{_MIXER}.query_norm"),
        WeightRule(f"{_ATTENTION}.key_layernorm", f"{_MIXER}.key_norm"),
        WeightRule(f"{_ATTENTION}.dense", f"{_MIXER}.out"),
    )

    def make_full(self, context: BuildContext, index: int, name: str) -> Mixer:
        """Ling 2's attention: a norm for each head, unless the config turns that off."""

        def norm(which: str) -> RMSNorm | None:
            if not self.settings.flag("use_qk_norm", True):
                return None
            return RMSNorm(context, f"{name}.{which}_layernorm", self.head_dim(), self.norm_eps())

        return self.attention(
            context,
            name,
            qkv_bias=self.settings.flag("use_qkv_bias", False),
            out_bias=self.settings.flag("use_bias", False),
            qkv_name="query_key_value",
            out_name="dense",
            part_names=(),
            query_norm=norm("query"),
            key_norm=norm("key"),
        )

    def make_recurrence(self, context: BuildContext, index: int, name: str) -> Mixer:
        return lightning_attention(self, context, index, name)


class BailingMoeV2_5ForCausalLM(HybridDecoder):
    """Ling-2.5-1T, Ring-2.5-1T, Ling-2.6: the layers that attend do so latently."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *_SHARED_RULES,
        *_LIGHTNING_RULES,
        *_MLA_RULES,
    )

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        self.latent = Latent(context, self)

    def make_full(self, context: BuildContext, index: int, name: str) -> Mixer:
        return self.latent.attention(context, name, MLAAttention)

    def make_recurrence(self, context: BuildContext, index: int, name: str) -> Mixer:
        return lightning_attention(self, context, index, name)


class BailingHybridForCausalLM(HybridDecoder):
    """Ling 3: Kimi's delta attention in the layers between, a gate for each latent head."""

    module_names: ClassVar[Sequence[tuple[str, str]]] = (
        (r"\.self_attn\.(forget_gate\.)?", ".attention."),
        (r"^model\.embed_tokens$", "model.word_embeddings"),
    )
    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *_SHARED_RULES,
        *_MLA_RULES,
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
    default_theta: ClassVar[float] = 6_000_000.0

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.check()
        self.settings.refuse("no_kda_lora", True)
        self.settings.refuse("gated_attention_proj_granularity_type", "head_wise")
        self.settings.refuse("use_mla_nope", False)
        self.rotary = None
        self.latent = Latent(context, self)

    def make_full(self, context: BuildContext, index: int, name: str) -> Mixer:
        return self.latent.attention(context, name, HeadGatedMLA)

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
