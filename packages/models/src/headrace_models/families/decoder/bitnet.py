"""BitNet b1.58: Llama with a norm before the last projection of each half, trained with ternary weights.

Ma et al. 2024, arXiv:2402.17764; Wang et al. 2025, arXiv:2504.12285; the norms: Wang et al. 2023,
arXiv:2310.11453. How weights are stored is the quantization method ``bitnet``'s affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.heads_norm import WholeRMSNorm
from headrace_models.layers.attention.self_attention import Attention, SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.head_view import by_heads, in_rows
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.loading.rules.llama import RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


class SubNormedAttention(Attention):
    """``out(norm(attention))``.

    Args:
        norm_eps: of the norm over all heads.
        arguments: of :class:`~headrace_models.layers.attention.self_attention.Attention`.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        num_heads: int,
        head_dim: int,
        norm_eps: float,
        **arguments: Any,
    ) -> None:
        super().__init__(context, name, num_heads=num_heads, head_dim=head_dim, **arguments)
        self.sub_norm = WholeRMSNorm(
            context, f"{name}.attn_sub_norm", num_heads, head_dim, norm_eps
        )

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        return self.out(in_rows(self.sub_norm(self.attend(*self.project(x), batch))))


class SubNormedMLP(GatedMLP):
    """``down(norm(act(gate(x)) * up(x)))``.

    Args:
        norm_eps: of the norm.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        norm_eps: float,
    ) -> None:
        super().__init__(context, name, hidden_size, intermediate_size, activation)
        self.sub_norm = WholeRMSNorm(
            context, f"{name}.ffn_sub_norm", intermediate_size, 1, norm_eps
        )

    def __call__(self, x: Tensor) -> Tensor:
        inner = by_heads(self.gate_up.gated(x, self.activation), 1)
        return self.down(in_rows(self.sub_norm(inner)))


class BitNetForCausalLM(LlamaDecoder):
    """microsoft/bitnet-b1.58-2B-4T."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *RULES,
        WeightRule("model.layers.{}.self_attn.attn_sub_norm", "layers.{}.attention.sub_norm"),
        WeightRule("model.layers.{}.mlp.ffn_sub_norm", "layers.{}.mlp.sub_norm"),
    )
    default_theta: ClassVar[float] = 500_000.0
    default_eps: ClassVar[float] = 1e-5

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        return SubNormedAttention(
            context,
            name,
            hidden_size=self.hidden_size(),
            num_heads=self.settings.integer("num_attention_heads"),
            num_kv_heads=self.settings.num_kv_heads(),
            head_dim=self.head_dim(),
            rotary=self.rotary,
            qkv_bias=bias,
            out_bias=bias,
            norm_eps=self.norm_eps(),
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return SubNormedMLP(
            context,
            name,
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_act", default="relu2"),
            norm_eps=self.norm_eps(),
        )
