"""AFMoE (Arcee's Trinity): gated attention, positions in layers with windows only, norms before and
after both halves, experts chosen by corrected sigmoids.

Arcee AI 2025, Trinity.

Block: ``h = x + norm(attention(norm(x))); h + norm(mlp(norm(h)))``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.attention.gated_attention import GatedAttention
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import SandwichBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.moe import MoEDecoder
from headrace_models.layers.moe.router import Routing
from headrace_models.loading.rules.llama import HEAD_NORM_RULES, RULES
from headrace_models.loading.rules.moe import expert_rules, router_rules, shared_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


_LAYER, _OWN = "model.layers.{}", "layers.{}"
_QKV = f"{_OWN}.attention.qkv"
_DEFAULT_PERIOD = 4
"""Without ``layer_types``, every fourth layer is full."""


class AfmoeForCausalLM(MoEDecoder):
    """Trinity Nano, Mini and Large."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(rule for rule in RULES if "qkv" not in rule.target and "_norm" not in rule.target),
        WeightRule("model.norm", "final_norm"),
        WeightRule(f"{_LAYER}.input_layernorm", f"{_OWN}.input_norm"),
        WeightRule(f"{_LAYER}.post_attention_layernorm", f"{_OWN}.attention_out_norm"),
        WeightRule(f"{_LAYER}.pre_mlp_layernorm", f"{_OWN}.mlp_norm"),
        WeightRule(f"{_LAYER}.post_mlp_layernorm", f"{_OWN}.mlp_out_norm"),
        WeightRule(f"{_LAYER}.self_attn.q_proj", _QKV, part=0),
        WeightRule(f"{_LAYER}.self_attn.gate_proj", _QKV, part=1),
        WeightRule(f"{_LAYER}.self_attn.k_proj", _QKV, part=2),
        WeightRule(f"{_LAYER}.self_attn.v_proj", _QKV, part=3),
        # Biases have no part for the gate.
        WeightRule(f"{_LAYER}.self_attn.k_proj.bias", f"{_QKV}.bias", part=1),
        WeightRule(f"{_LAYER}.self_attn.v_proj.bias", f"{_QKV}.bias", part=2),
        *HEAD_NORM_RULES,
        *router_rules(f"{_LAYER}.mlp.router.gate", f"{_LAYER}.mlp.expert_bias"),
        *expert_rules(),
        *shared_rules(),
    )
    mixture: ClassVar[Mapping[str, Any]] = {
        "corrected": True, "exact_router": True, "router_name": "router.gate",
    }  # fmt: skip
    default_eps: ClassVar[float] = 1e-5

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return SandwichBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_norm(context, f"{name}.pre_mlp_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_mlp_layernorm"),
        )

    def token_vectors(self, ids: Tensor) -> Tensor:
        vectors = self.embed(ids)
        if not self.settings.flag("mup_enabled", False):
            return vectors
        return self.context.ops.scale(vectors, self.hidden_size() ** 0.5)

    def is_sliding(self, index: int) -> bool:
        kinds = self.settings.layer_types()
        if kinds is not None:
            return kinds[index] == "sliding_attention"
        return (index + 1) % self.settings.integer(
            "global_attn_every_n_layers", _DEFAULT_PERIOD
        ) != 0

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias, sliding = self.settings.flag("attention_bias", False), self.is_sliding(index)
        return GatedAttention(
            context,
            name,
            hidden_size=self.hidden_size(),
            num_heads=self.settings.integer("num_attention_heads"),
            num_kv_heads=self.settings.num_kv_heads(),
            head_dim=self.head_dim(),
            rotary=self.rotary if sliding else None,
            sliding_window=self.settings.integer("sliding_window", 1024) if sliding else None,
            head_norm_eps=self.norm_eps(),
            gate_name="gate_proj",
            qkv_bias=bias,
            out_bias=bias,
        )

    def head_dim(self) -> int:
        return self.settings.head_dim(default=128)

    def is_dense(self, index: int) -> bool:
        return index < self.settings.integer("num_dense_layers", 1, minimum=0)

    def routing(self, index: int) -> Routing:
        self.settings.refuse("score_func", "sigmoid")
        return Routing(
            num_experts=self.settings.integer("num_experts", maximum=MAX_EXPERTS),
            top_k=self.settings.integer("num_experts_per_tok"),
            scoring="sigmoid",
            renormalise=self.settings.flag("route_norm", True),
            scale=self.settings.number("route_scale", 1.0),
            num_groups=self.settings.integer("n_group", 1),
            top_groups=self.settings.integer("topk_group", 1),
            group_score="top2",
        )

    def shared_size(self, index: int) -> int:
        count = self.settings.integer("num_shared_experts", 0, minimum=0)
        return self.expert_size(index) * count
