"""The language model of Step 3: attention whose queries are made in two steps and look at one key a token,
and mixtures of experts beside an expert that all tokens go to.

StepFun 2025, arXiv:2507.19427 (multi-matrix factorization attention: Hu et al. 2024, arXiv:2412.19255).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Spelling
from headrace_models.layers.attention.self_attention import Attention, SelfAttention
from headrace_models.layers.base import Part
from headrace_models.layers.decoders.moe import MoEDecoder, softmax_routing
from headrace_models.layers.linear import Linear, column_parallel
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.norm import RMSNorm
from headrace_models.loading.rules.llama import RULES
from headrace_models.loading.rules.moe import router_rules, shared_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_LAYER, _OWN = "model.layers.{}", "layers.{}"
_EXPERTS = f"{_OWN}.mlp.experts.{{}}"
_MLP = ".mlp"


class Step3TextForCausalLM(MoEDecoder):
    """Step 3 without its eyes."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *RULES,
        WeightRule(f"{_LAYER}.self_attn.inter_norm", f"{_OWN}.attention.between"),
        WeightRule(f"{_LAYER}.self_attn.wq", f"{_OWN}.attention.queries"),
        *router_rules(f"{_LAYER}.moe.gate"),
        WeightRule(f"{_LAYER}.moe.gate_proj.weight", f"{_EXPERTS}.gate_up.weight", 0, stacked=True),
        WeightRule(f"{_LAYER}.moe.up_proj.weight", f"{_EXPERTS}.gate_up.weight", 1, stacked=True),
        WeightRule(f"{_LAYER}.moe.down_proj.weight", f"{_EXPERTS}.down.weight", stacked=True),
        *shared_rules(f"{_LAYER}.share_expert"),
    )
    default_theta: ClassVar[float] = 500_000.0
    default_eps: ClassVar[float] = 1e-5
    spelling: ClassVar[Spelling] = {
        "max_position_embeddings": ("max_position_embedding", "max_seq_len"),
        "num_key_value_heads": ("num_attention_groups",),
        "num_experts_per_tok": ("moe_top_k",),
        "norm_topk_prob": ("norm_expert_weight",),
    }

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        self.settings.refuse("num_key_value_heads", 1)
        middle = self.settings.optional_integer("share_q_dim") or self.head_dim()
        return self.attention(
            context, name, kind=_Attention, num_kv_heads=1, middle=middle, eps=self.norm_eps()
        )

    def is_dense(self, index: int) -> bool:
        return index not in self._mixtures()

    def routing(self, index: int) -> Routing:
        return softmax_routing(self.settings, experts="moe_num_experts", top_k=3)

    def gate(self) -> str:
        return self.settings.activation("hidden_act", default="silu")

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        if not self.is_dense(index):
            return self.make_mixture(context, index, f"{name.removesuffix(_MLP)}.moe")
        size = self.settings.integer("intermediate_size")
        return GatedMLP(context, name, self.hidden_size(), size, self.gate())

    def make_shared(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        name = f"model.layers.{index}.share_expert"
        size = self.settings.integer("share_expert_dim")
        return GatedMLP(context, name, self.hidden_size(), size, self.gate())

    def _mixtures(self) -> Sequence[int]:
        """Layers that are mixtures: numbers with commas between, or a list; all but the first if left out."""
        stated = self.settings.config.get("moe_layers_enum")
        if stated is None:
            return range(1, self.num_layers())
        found = stated.strip().split(",") if isinstance(stated, str) else stated
        try:
            return [int(index) for index in found]
        except (TypeError, ValueError) as error:
            raise UnsupportedModel(
                f"config.json: moe_layers_enum = {stated!r:.200}: must be numbers of layers"
            ) from error


class _Attention(Attention):
    """Queries are ``queries(between(down(x)))``, with a norm between two projections.

    Args:
        middle: size between.
        eps: of the norm.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        middle: int,
        eps: float,
        **arguments: Any,
    ) -> None:
        super().__init__(
            context,
            name,
            hidden_size=hidden_size,
            num_heads=num_heads,
            head_dim=head_dim,
            **arguments,
        )
        self.middle = middle
        self.qkv = Linear(
            context,
            f"{name}.qkv_proj",
            hidden_size,
            [Part(middle), Part(head_dim), Part(head_dim)],
            part_names=tuple(f"{name}.{part}_proj" for part in "qkv"),
        )
        self.between = RMSNorm(context, f"{name}.inter_norm", middle, eps)
        self.queries = column_parallel(
            context, f"{name}.wq", middle, (num_heads * head_dim,), units=(num_heads,)
        )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`ProjectedAttention.project`."""
        made = self.qkv(x)
        down, key, value = torch.split(made, [self.middle, self.head_dim, self.head_dim], dim=1)
        query = self.queries(self.between(down.contiguous()))
        return query.view(len(x), -1, self.head_dim), key[:, None], value[:, None]
