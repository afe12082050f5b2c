"""openPangu Ultra MoE: latent attention and mixtures of experts as DeepSeek V3 has them,
with norms before and after both halves.

Tang et al. 2025, arXiv:2505.04519.

Block: ``h = x + norm(attention(norm(x))); h + norm(mlp(norm(h)))``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.settings import Spelling
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.mla import (
    MLA_MOE_RULES,
    MLADecoder,
    grouped_routing,
    is_dense_by_frequency,
)
from headrace_models.layers.mlp import MLPLayer
from headrace_models.loading.further_layers import further_layers

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.layers.attention.self_attention import SelfAttention
    from headrace_models.layers.norm import NormLayer


_LAYER = "model.layers.{}"


class PanguUltraMoEBlock(Block):
    """``h = x + norm(attention(norm(x))); h + norm(mlp(norm(h)))``: sandwich norms."""

    def __init__(
        self,
        input_norm: NormLayer,
        attention: SelfAttention,
        attention_out_norm: NormLayer,
        mlp_norm: NormLayer,
        mlp: MLPLayer,
        mlp_out_norm: NormLayer,
    ) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.attention_out_norm = attention_out_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_out_norm = mlp_out_norm

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        x = self.attention_out_norm(self.attention(x, batch))
        x, stream = self.mlp_norm.add(x, stream)
        return self.mlp_out_norm(self.mlp(x)), stream


class PanguUltraMoEForCausalLM(MLADecoder):
    """openPangu Ultra MoE 718B. Sizes under DeepSeek's names, or the first release's."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(r for r in MLA_MOE_RULES if not r.target.endswith("mlp_norm")),
        WeightRule(f"{_LAYER}.post_attention_layernorm", "layers.{}.attention_out_norm"),
        WeightRule(f"{_LAYER}.pre_mlp_layernorm", "layers.{}.mlp_norm"),
        WeightRule(f"{_LAYER}.post_mlp_layernorm", "layers.{}.mlp_out_norm"),
    )
    spelling: ClassVar[Spelling] = {
        "q_lora_rank": ("attention_q_lora_dim",),
        "kv_lora_rank": ("attention_kv_lora_dim",),
        "qk_nope_head_dim": ("attention_qk_dim",),
        "qk_rope_head_dim": ("attention_qk_rope_dim",),
        "v_head_dim": ("attention_v_dim",),
        "first_k_dense_replace": ("num_dense_layers",),
        "n_routed_experts": ("num_routed_experts",),
        "n_shared_experts": ("num_shared_experts",),
        "num_nextn_predict_layers": ("num_mtp_layers",),
    }

    @property
    def ignored_weights(self) -> Mapping[str, str]:
        """See :class:`headrace_core.model.IgnoresWeights`."""
        return further_layers(self.settings, self.num_layers())

    def prepare(self, context: BuildContext, prefix: str) -> None:
        for key, served in (
            ("sandwich_norm", True),
            ("param_sink_number", 0),
            ("use_mome", False),
        ):
            self.settings.refuse(key, served)
        for key in ("index_topk", "sliding_window", "sliding_window_list"):
            self.settings.refuse(key)
        super().prepare(context, prefix)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return PanguUltraMoEBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_norm(context, f"{name}.pre_mlp_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_mlp_layernorm"),
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        if is_dense_by_frequency(self.settings, index):
            return super().make_mlp(context, index, name)
        return self.make_mixture(
            context, name, grouped_routing(self.settings), corrected=self.is_corrected()
        )

    def is_corrected(self) -> bool:
        """A switch of the first release; without it there is a correction."""
        return self.settings.flag("router_enable_expert_bias", True)
