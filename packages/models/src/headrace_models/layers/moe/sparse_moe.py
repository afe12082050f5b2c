"""Mixtures of experts: a router picks a few gated MLPs per token.

Letters: T tokens, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.moe.experts import GATED_NAMES, Experts
from headrace_models.layers.moe.router import Router, Routing, single_expert

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class SparseMoE(MLPLayer):
    """``sum over the chosen experts of weight_e * expert_e(x)``, plus what every token gets.

    Args:
        name: of the mixture, as the checkpoint spells it.
        router_name, experts_name: below that; the experts are numbered from 0.
        expert_names: the checkpoint's names of an expert's gate, up and down; two: it has no gate.
        identities: so many of the experts that are routed to, the last ones, give back x (LongCat).
        router_bias, corrected, correction_shape, exact_router, router_soft_cap: see :class:`Router`.
        expert_bias: of all of an expert's products.
        shared: an expert that all tokens go to.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        intermediate_size: int,
        routing: Routing,
        activation: str,
        router_name: str = "gate",
        experts_name: str = "experts",
        expert_names: tuple[str, ...] = GATED_NAMES,
        identities: int = 0,
        router_bias: bool = False,
        corrected: bool = False,
        correction_shape: tuple[int, ...] | None = None,
        exact_router: bool = False,
        router_soft_cap: float = 0.0,
        expert_bias: bool = False,
        shared: MLPLayer | None = None,
    ) -> None:
        self.ops = context.ops
        self.communicator = context.communicator
        self.router = Router(
            context,
            f"{name}.{router_name}",
            hidden_size,
            routing,
            bias=router_bias,
            corrected=corrected,
            correction_shape=correction_shape,
            exact=exact_router,
            soft_cap=router_soft_cap,
        )
        self.experts = Experts(
            context,
            [f"{name}.{experts_name}.{i}" for i in range(routing.num_experts - identities)],
            hidden_size,
            intermediate_size,
            activation,
            module_names=expert_names,
            bias=expert_bias,
            identities=identities,
            top_k=routing.top_k,
        )
        self.shared = shared

    def __call__(self, x: Tensor) -> Tensor:
        out = self.experts.summed(self.experts(x, *self.router(x)))
        return out if self.shared is None else self.ops.add(out, self.shared(x))


class GatedExpert(MLPLayer):
    """``sigmoid(gate(x)) * expert(x)``: a mixture of one, as Qwen2-MoE's shared expert is.

    Args:
        name, gate_name: of the expert and of the layer that weighs it, as the checkpoint spells them.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        gate_name: str,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
    ) -> None:
        self.communicator = context.communicator
        self.router = Router(context, gate_name, hidden_size, single_expert())
        self.experts = Experts(context, [name], hidden_size, intermediate_size, activation)

    def __call__(self, x: Tensor) -> Tensor:
        return self.experts.summed(self.experts(x, *self.router(x)))
