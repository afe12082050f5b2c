"""Laguna: gated attention with as many heads as each layer's entry says, experts chosen by corrected
sigmoids.

Poolside 2026.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.attention.self_attention import Attention, SelfAttention
from headrace_models.layers.decoders.moe import MOE_RULES, MoEDecoder, is_dense_by_list
from headrace_models.layers.linear import column_parallel
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.rules.llama import HEAD_NORM_RULES
from headrace_models.loading.rules.moe import shared_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


_LAYER, _OWN = "model.layers.{}", "layers.{}"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_BY_HEAD, _BY_ELEMENT = "per-head", "per-element"


class SoftplusGatedAttention(Attention):
    """``out(attention * softplus(gate(x)))``.

    Args:
        gate_width: gates of each head: 1, or one for each of its dimensions.
        arguments: of :class:`~headrace_models.layers.attention.self_attention.Attention`.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        gate_width: int,
        **arguments: Any,
    ) -> None:
        super().__init__(context, name, hidden_size=hidden_size, num_heads=num_heads, **arguments)
        self.gates = column_parallel(
            context, f"{name}.g_proj", hidden_size, (num_heads * gate_width,), units=(num_heads,)
        )

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        out = self.attend(*self.project(x), batch).flatten(1)
        return self.out(self.ops.gate(out, self.gates(x), activation="softplus"))


class LagunaForCausalLM(MoEDecoder):
    """Laguna XS, S and M."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *MOE_RULES,
        *HEAD_NORM_RULES,
        WeightRule(f"{_LAYER}.self_attn.g_proj", f"{_OWN}.attention.gates"),
        *shared_rules(f"{_LAYER}.mlp.shared_expert"),
        WeightRule(
            f"{_LAYER}.mlp.experts.e_score_correction_bias", f"{_OWN}.mlp.router.correction"
        ),
    )
    shared_name: ClassVar[str] = "shared_expert"

    def prepare(self, context: BuildContext, prefix: str) -> None:
        config = self.settings.config
        is_stated = bool(config.get("rope_parameters"))
        limit = self.settings.integer("max_position_embeddings", 131072)
        full = rope_settings(config, _FULL, theta=5e5, partial=1.0 if is_stated else 0.5)
        local = rope_settings(config, _SLIDING, theta=1e4)
        self.tables = {
            kind: rotary_table(context, rope, self.head_dim(), max_positions=limit)
            for kind, rope in ((_FULL, full), (_SLIDING, local))
        }
        key, count = "num_attention_heads_per_layer", self.num_layers()
        self.heads: Sequence[int] = (
            [self.settings.integer("num_attention_heads")] * count
            if config.get(key) is None
            else self.settings.integers(key, count)
        )

    def head_dim(self) -> int:
        return self.settings.head_dim(default=128)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        kinds, heads = self.settings.layer_types(), self.heads[index]
        kind = _FULL if kinds is None else kinds[index]
        kv_heads = self.settings.integer("num_key_value_heads")
        if heads % kv_heads:
            raise UnsupportedModel(
                f"config.json: layer {index} has {heads} heads: must be a multiple of "
                f"num_key_value_heads = {kv_heads}"
            )
        bias = self.settings.flag("attention_bias", False)
        return SoftplusGatedAttention(
            context,
            name,
            hidden_size=self.hidden_size(),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=self.head_dim(),
            rotary=self.tables[kind],
            sliding_window=self.settings.integer("sliding_window") if kind == _SLIDING else None,
            head_norm_eps=self.norm_eps(),
            qkv_bias=bias,
            out_bias=bias,
            gate_width=1 if self._gates_heads() else self.head_dim(),
        )

    def _gates_heads(self) -> bool:
        """True if all of a head goes through one gate."""
        self.settings.refuse("gating", True, _BY_HEAD, _BY_ELEMENT)
        return self.settings.config.get("gating") != _BY_ELEMENT

    def is_dense(self, index: int) -> bool:
        return is_dense_by_list(self.settings, index, 1)

    def routing(self, index: int) -> Routing:
        self.settings.refuse("moe_apply_router_weight_on_input", False)
        return Routing(
            num_experts=self.settings.integer("num_experts", maximum=MAX_EXPERTS),
            top_k=self.settings.integer("num_experts_per_tok"),
            scoring="sigmoid",
            renormalise=True,
            scale=self.settings.number("moe_routed_scaling_factor", 1.0),
        )

    def make_mixture(
        self, context: BuildContext, index: int, name: str, **differences: Any
    ) -> SparseMoE:
        cap = self.settings.optional_positive("moe_router_logit_softcapping") or 0.0
        own = {"corrected": True, "exact_router": True, "router_soft_cap": cap}
        return super().make_mixture(context, index, name, **{**own, **differences})

    def shared_size(self, index: int) -> int:
        return self.settings.integer("shared_expert_intermediate_size", 0, minimum=0)
