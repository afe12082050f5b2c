"""Flint: sinks and head norms, positions only where there are windows, experts chosen by sigmoids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.moe import MOE_RULES, MoEDecoder
from headrace_models.layers.moe.router import Routing
from headrace_models.loading.rules.llama import HEAD_NORM_RULES
from headrace_models.loading.rules.moe import shared_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


_ATTENTION = "model.layers.{}.self_attn"
_DENSE_FIRST = 2


class FlintForCausalLM(MoEDecoder):
    """Flint."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *MOE_RULES,
        *HEAD_NORM_RULES,
        *shared_rules("model.layers.{}.mlp.shared_expert"),
        WeightRule(f"{_ATTENTION}.softmax_offset", "layers.{}.attention.sinks.weight"),
        WeightRule(f"{_ATTENTION}.sinks", "layers.{}.attention.sinks.weight"),
    )
    mixture: ClassVar[Mapping[str, Any]] = {"exact_router": True}
    shared_name: ClassVar[str] = "shared_expert"

    def head_dim(self) -> int:
        return self.settings.head_dim(default=128)

    def is_dense(self, index: int) -> bool:
        listed = self.settings.config.get("mlp_only_layers") is not None
        dense = self.settings.integers("mlp_only_layers") if listed else range(_DENSE_FIRST)
        step = self.settings.integer("decoder_sparse_step", 1)
        return index in dense or (index + 1) % step != 0

    def is_sliding(self, index: int) -> bool:
        kinds = self.settings.layer_types()
        if kinds is not None:
            return kinds[index] == "sliding_attention"
        return index >= _DENSE_FIRST and index % 4 != 1 and index != self.num_layers() - 1

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias, sliding = self.settings.flag("attention_bias", False), self.is_sliding(index)
        return self.attention(
            context,
            name,
            rotary=self.rotary if sliding else None,
            sliding_window=self.settings.integer("sliding_window", 513) if sliding else None,
            sinks=True,
            qkv_bias=bias,
            out_bias=bias,
            head_norm_eps=self.norm_eps(),
        )

    def routing(self, index: int) -> Routing:
        return Routing(
            num_experts=self.settings.integer("num_experts", maximum=MAX_EXPERTS),
            top_k=self.settings.integer("num_experts_per_tok", 6),
            scoring="sigmoid",
            renormalise=self.settings.flag("norm_topk_prob", True),
        )

    def shared_size(self, index: int) -> int:
        return self.settings.integer("shared_expert_intermediate_size")
