"""MiniCPM 1, 2 and 4: Granite's multipliers, given by the depth and by the width of the model that they
were found on.

Hu et al. 2024, arXiv:2404.06395.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace_models.families.llama import LlamaForCausalLM
from headrace_models.layers.blocks import ScaledBlock
from headrace_models.layers.decoder import Block

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class MiniCPMForCausalLM(LlamaForCausalLM):
    """The dense ones."""

    ties_embeddings: ClassVar[bool] = True

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("num_experts", 0)
        self.settings.refuse("sparse_config")
        super().prepare(context, prefix)

    def token_vectors(self, ids: Tensor) -> Tensor:
        return self.context.ops.scale(self.embed(ids), self.settings.number("scale_emb", 1.0))

    def logits_multiplier(self) -> float:
        return self.settings.positive("dim_model_base", 1.0) / self.hidden_size()

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return ScaledBlock(
            context.ops,
            self.settings.number("scale_depth", 1.0) / self.num_layers() ** 0.5,
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )
