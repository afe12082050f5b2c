"""nanochat: norms without weights everywhere, squared ReLU, positions that turn the other way.

Karpathy 2025, nanochat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import MLP, MLPLayer
from headrace_models.layers.norm import RMSNorm
from headrace_models.loading.rules.llama import RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


class NanoChatForCausalLM(LlamaDecoder):
    """nanochat, as converted for transformers."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(rule for rule in RULES if ".mlp." not in rule.target),
        WeightRule("model.layers.{}.mlp.fc1", "layers.{}.mlp.up"),
        WeightRule("model.layers.{}.mlp.fc2", "layers.{}.mlp.down"),
    )

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        assert self.rotary is not None
        cosines, sines = self.rotary.chunk(2, dim=-1)
        # Norms behind the rotation undo the factor that an extension of the context (YaRN) puts on it.
        length = torch.hypot(cosines, sines)
        self.rotary = torch.cat((cosines / length, -sines / length), dim=-1)
        self.embed_norm = self.make_norm(context, f"{prefix}model.embed_norm")

    def embed_tokens(self, batch: ForwardBatch) -> Tensor:
        return self.embed_norm(self.input_vectors(batch))

    def make_norm(self, context: BuildContext, name: str) -> RMSNorm:
        return RMSNorm(context, name, self.hidden_size(), self.norm_eps(), weight=False)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        """Its head norms come behind the rotation: without weights that makes no difference, once the
        rotation keeps lengths."""
        bias = self.settings.flag("attention_bias", False)
        size, eps = self.head_dim(), self.norm_eps()
        return self.attention(
            context,
            name,
            qkv_bias=bias,
            out_bias=bias,
            query_norm=RMSNorm(context, f"{name}.q_norm", size, eps, weight=False),
            key_norm=RMSNorm(context, f"{name}.k_norm", size, eps, weight=False),
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return MLP(
            context,
            f"{name}.fc1",
            f"{name}.fc2",
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_act"),
            bias=False,
        )
