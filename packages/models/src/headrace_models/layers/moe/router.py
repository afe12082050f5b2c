"""Routers: the choice of experts for each row.

Letters: T tokens, H hidden size, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace_core.errors import UnsupportedModel
from headrace_core.ops import PackedLinear
from headrace_models.layers.base import Slot, WeightLayer
from headrace_models.layers.linear import with_adapters

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_models.lora.places import LinearPlace


@dataclass(frozen=True, slots=True)
class Routing:
    """A family's way to choose experts and weigh them; :class:`headrace_core.ops.RouteExpertsOp` says
    what each field means.

    Raises:
        UnsupportedModel: there are not as many experts to choose from as are to be chosen.
    """

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            raise UnsupportedModel(
                f"config.json: the best {self.top_groups} of {self.num_groups} groups of "
                f"{self.num_experts} experts: groups must be equal, and no more be chosen than are"
            )
        candidates = self.num_experts // self.num_groups * self.top_groups
        if self.top_k > candidates:
            raise UnsupportedModel(
                f"config.json: {self.top_k} experts for each token: must be at most {candidates} "
                f"experts, of {self.num_experts}"
            )


class Router(WeightLayer):
    """Scores of the experts, and the choice by them.

    Args:
        name: of the linear layer, as the checkpoint spells it.
        bias: of the linear layer.
        corrected: there is a term of each score that counts in choosing and not in weighing.
        correction_shape: as the checkpoint has that term; default [E].
        exact: score in float32 whatever the activations are.
        soft_cap: what tanh keeps the linear layer's results within; 0: nothing (Grok).
    """

    low_rank: LinearPlace | None = None
    """See :class:`~headrace_models.layers.linear.Linear`."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        hidden_size: int,
        routing: Routing,
        *,
        bias: bool = False,
        corrected: bool = False,
        correction_shape: tuple[int, ...] | None = None,
        exact: bool = False,
        soft_cap: float = 0.0,
    ) -> None:
        self.name = name
        self.soft_cap = soft_cap
        self.ops = context.ops
        self.routing = routing
        self.hidden_size = hidden_size
        self.has_bias, self.corrected = bias, corrected
        self.correction_shape = correction_shape or (routing.num_experts,)
        self.exact = exact and context.dtype != "float32"
        self.packed: PackedLinear | None = None
        self.bias: Tensor | None = None
        self.correction: Tensor | None = None

    def slots(self) -> Mapping[str, Slot]:
        dtype = "float32" if self.exact else None
        wanted = {"weight": self._slot((self.routing.num_experts, self.hidden_size), dtype)}
        if self.has_bias:
            wanted["bias"] = self._slot((self.routing.num_experts,), dtype)
        if self.corrected:
            wanted["correction"] = self._slot(self.correction_shape, "float32")
        return wanted

    @staticmethod
    def _slot(shape: tuple[int, ...], dtype: str | None) -> Slot:
        return Slot(shape, dtype=dtype, any_float=dtype is not None)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.packed = self.ops.linear.pack(tensors["weight"])
        self.bias = tensors.get("bias")
        if self.corrected:
            self.correction = tensors["correction"].flatten()

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> weights [T, k] float32, experts [T, k] int64."""
        assert self.packed is not None, self.name
        x = self.ops.to_float32(x) if self.exact else x
        how = self.routing
        scores = with_adapters(self.low_rank, self.ops.linear(x, self.packed, self.bias), x)
        if self.soft_cap:
            scores = self.ops.to_float32(scores, soft_cap=self.soft_cap)
        return self.ops.route_experts(
            scores,
            how.top_k,
            scoring=how.scoring,
            bias=self.correction,
            num_groups=how.num_groups,
            top_groups=how.top_groups,
            group_score=how.group_score,
            renormalise=how.renormalise,
            scale=how.scale,
            jitter=how.jitter,
        )


def single_expert() -> Routing:
    """The routing of a mixture of one: the sigmoid of one score weighs it."""
    return Routing(num_experts=1, top_k=1, scoring="sigmoid")
