"""Grok 1 and 2: norms before and after both halves, scores of attention and router kept within tanh.

Block: ``h = x + norm(attention(norm(x))); h + norm(experts(norm(h)))``.

xAI 2024, github.com/xai-org/grok-1. Grok 2's mixtures have an MLP beside them that all tokens go to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.attention import LOGIT_SCALE
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_EXPERTS, Spelling
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import SandwichBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.loading.rules.moe import EXPERT_NAMES, expert_rules, router_rules, shared_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


_LAYER, _OWN = "model.layers.{}", "layers.{}"
_EXPERTS = ("linear", "linear_v", "linear_1")
_SOFT_CAP = 30.0
_NORMS = {
    f"{_LAYER}.pre_attn_norm": f"{_OWN}.input_norm",
    f"{_LAYER}.post_attn_norm": f"{_OWN}.attention_out_norm",
    f"{_LAYER}.pre_moe_norm": f"{_OWN}.mlp_norm",
    f"{_LAYER}.post_moe_norm": f"{_OWN}.mlp_out_norm",
    "model.norm": "final_norm",
}


def _attention_rules(source: str) -> tuple[WeightRule, ...]:
    parts = enumerate(f"{source}.{part}_proj" for part in "qkv")
    return (
        *(WeightRule(name, f"{_OWN}.attention.qkv", part) for part, name in parts),
        WeightRule(f"{source}.o_proj", f"{_OWN}.attention.out"),
    )


_UNMIXED = (
    WeightRule("model.embed_tokens", "embed"),
    WeightRule("lm_head", "head"),
    *(WeightRule(source, target) for source, target in _NORMS.items()),
)


class LeveledMoE(SparseMoE):
    """Mixture and MLP add up to what each of them would be by itself."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.scale(super().__call__(x), 0.5**0.5)


class Grok1ModelForCausalLM(LlamaDecoder):
    """Grok-1 as converted for torch."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *_UNMIXED,
        *(WeightRule(f"{source}.scale", f"{target}.weight") for source, target in _NORMS.items()),
        *_attention_rules(f"{_LAYER}.attn"),
        *router_rules(f"{_LAYER}.moe_block.gate"),
        *expert_rules(f"{_LAYER}.moe_block.experts", names=_EXPERTS),
    )
    attention_name: ClassVar[str] = "attn"
    mixture_name: ClassVar[str] = "moe_block"
    expert_names: ClassVar[tuple[str, str, str]] = _EXPERTS
    default_eps: ClassVar[float] = 1e-5
    spelling: ClassVar[Spelling] = {
        "num_local_experts": ("num_experts",),
        "moe_intermediate_size": ("intermediate_size",),
        "attn_logit_softcapping": ("max_attn_value",),
    }

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return SandwichBlock(
            self.make_norm(context, f"{name}.pre_attn_norm"),
            self.make_attention(context, index, f"{name}.{self.attention_name}"),
            self.make_norm(context, f"{name}.post_attn_norm"),
            self.make_norm(context, f"{name}.pre_moe_norm"),
            self.make_mlp(context, index, f"{name}.{self.mixture_name}"),
            self.make_norm(context, f"{name}.post_moe_norm"),
        )

    def token_vectors(self, ids: Tensor) -> Tensor:
        factor = self.settings.positive("embedding_multiplier_scale", 6144**0.5)
        return self.context.ops.scale(self.embed(ids), factor)

    def logits_multiplier(self) -> float:
        return self.settings.positive("output_multiplier_scale", 1 / math.sqrt(3))

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.capped_attention(context, name)

    def capped_attention(
        self, context: BuildContext, name: str, **differences: Any
    ) -> SelfAttention:
        cap = self.settings.number("attn_logit_softcapping", _SOFT_CAP)
        return self.attention(
            context,
            name,
            scale=self.settings.optional_positive("attn_output_multiplier"),
            soft_cap=max(cap, 0.0),
            **differences,
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return SparseMoE(context, name, **self.mixture())

    def mixture(self) -> dict[str, Any]:
        """Arguments of :class:`SparseMoE`. Weights are shares of all experts."""
        return {
            "hidden_size": self.hidden_size(),
            "intermediate_size": self.settings.integer("moe_intermediate_size"),
            "routing": Routing(
                num_experts=self.settings.integer("num_local_experts", 8, maximum=MAX_EXPERTS),
                top_k=self.settings.integer("num_experts_per_tok", 2),
            ),
            "activation": self.gate(),
            "expert_names": self.expert_names,
            "router_soft_cap": self.settings.optional_positive("router_logit_softcapping")
            or _SOFT_CAP,
            "exact_router": True,
        }

    def gate(self) -> str:
        """JAX's gelu is the one by tanh."""
        self.settings.refuse("hidden_act", "gelu", "gelu_new", "gelu_pytorch_tanh")
        return "gelu_tanh"


class Grok1ForCausalLM(Grok1ModelForCausalLM):
    """Grok-2. Behind ``attn_temperature_len`` L scores grow with the query's position p, by
    ``log p / log L``."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *_UNMIXED,
        *_attention_rules(f"{_LAYER}.self_attn"),
        *router_rules(f"{_LAYER}.block_sparse_moe.gate"),
        *expert_rules(f"{_LAYER}.block_sparse_moe.experts", names=EXPERT_NAMES),
        *shared_rules(f"{_LAYER}.mlp"),
    )
    attention_name: ClassVar[str] = "self_attn"
    mixture_name: ClassVar[str] = "block_sparse_moe"
    expert_names: ClassVar[tuple[str, str, str]] = EXPERT_NAMES

    def prepare(self, context: BuildContext, prefix: str) -> None:
        for key, served in (
            ("rope_type", "original"),
            ("rope_rotate_half_dims", False),
            ("attn_logit_softcapping_method", "tanh"),
        ):
            self.settings.refuse(key, served)
        super().prepare(context, prefix)
        self.scales = self.logit_scale(context)

    def logit_scale(self, context: BuildContext) -> Tensor | None:
        """[P] float32; None: no position is far enough."""
        length = self.settings.integer("attn_temperature_len", -1, minimum=-1)
        if not 1 < length < context.max_model_len - 1:
            return None
        positions = torch.arange(context.max_model_len, dtype=torch.float32)
        grown = torch.log2(positions.clamp(min=1)) / math.log2(length)
        return torch.where(positions > length, grown, 1.0).to(context.device)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        if self.scales is None:
            return self.capped_attention(context, name)
        own = {"logit_scale": self.scales}
        return self.capped_attention(context, name, extras=own, features={LOGIT_SCALE})

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        """Experts, and in published models an MLP beside them that all tokens go to."""
        if not self.settings.flag("residual_moe", False):
            return super().make_mlp(context, index, name)
        beside = f"{name.removesuffix(self.mixture_name)}mlp"
        size = self.settings.integer("intermediate_size")
        mlp = GatedMLP(context, beside, self.hidden_size(), size, self.gate())
        return LeveledMoE(context, name, shared=mlp, **self.mixture())
