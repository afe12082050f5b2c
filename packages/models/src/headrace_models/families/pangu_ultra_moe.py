"""openPangu Ultra MoE: DeepSeek V3 with norms after both halves too.

Tang et al. 2025, arXiv:2505.04519.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.deepseek_v3 import DeepseekV3ForCausalLM
from headrace_models.layers.blocks import SandwichBlock
from headrace_models.layers.decoder import Block
from headrace_models.settings import Spelling

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


_LAYER = "model.layers.{}"


class PanguUltraMoEForCausalLM(DeepseekV3ForCausalLM):
    """openPangu Ultra MoE 718B. Sizes under DeepSeek's names, or the first release's."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(r for r in DeepseekV3ForCausalLM.weight_rules if not r.target.endswith("mlp_norm")),
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
        return SandwichBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_norm(context, f"{name}.pre_mlp_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_mlp_layernorm"),
        )

    def is_corrected(self) -> bool:
        """A switch of the first release; without it there is a correction."""
        return self.settings.flag("router_enable_expert_bias", True)
