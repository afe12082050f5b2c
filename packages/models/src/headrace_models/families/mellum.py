"""Mellum 2: Qwen3 MoE with windows and a rotary base of their own on some layers. JetBrains 2026."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from headrace_models.families.llama import LlamaForCausalLM
from headrace_models.families.moe_shape import is_dense_by_list
from headrace_models.families.qwen3_moe import Qwen3MoeForCausalLM
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.rotary import rotary_table
from headrace_models.rope import of_windows, rope_settings

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_THETA, _LOCAL_THETA = 500_000.0, 10_000.0


class MellumForCausalLM(Qwen3MoeForCausalLM):
    """Mellum 2. Its layer that guesses a token ahead is not run."""

    ignored_weights: ClassVar[Mapping[str, str]] = {r"mtp\..*": "guesses a token ahead"}

    renormalises: ClassVar[bool] = True

    def prepare(self, context: BuildContext, prefix: str) -> None:
        size, config = self.head_dim(), context.config
        limit = self.settings.integer("max_position_embeddings", 131_072)
        rope = rope_settings(config, "full_attention", theta=_THETA)
        self.rotary = rotary_table(context, rope, size, max_positions=limit)
        local = of_windows(config, _LOCAL_THETA)
        local_rope = rope_settings(local, "sliding_attention", theta=_LOCAL_THETA)
        self.local_rotary = rotary_table(context, local_rope, size, max_positions=limit)

    def head_dim(self) -> int:
        return self.settings.head_dim(default=128)

    def sliding_window(self, index: int) -> int | None:
        kinds = self.settings.layer_types()
        if kinds is None or kinds[index] != "sliding_attention":
            return None
        return self.settings.integer("sliding_window", 1024)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias, window = self.settings.flag("attention_bias", False), self.sliding_window(index)
        return self.attention(
            context,
            name,
            rotary=self.rotary if window is None else self.local_rotary,
            sliding_window=window,
            qkv_bias=bias,
            out_bias=bias,
            head_norm_eps=self.norm_eps(),
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        if is_dense_by_list(self.settings, index, 0):
            return LlamaForCausalLM.make_mlp(self, context, index, name)
        return self.sparse_mlp(context, name)
