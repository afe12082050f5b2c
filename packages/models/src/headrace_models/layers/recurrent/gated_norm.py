"""A norm with a gate, which stands behind recurrences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace_core.errors import UnsupportedModel
from headrace_models.layers.base import Part, Slot, WeightLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class GatedRMSNorm(WeightLayer):
    """See :class:`headrace_core.ops.GatedRMSNormOp`.

    Args:
        own: the channels that this rank keeps.
        groups: equal parts of all channels, each with its own RMS.
        shared: one weight for all groups, instead of one for each channel.

    Raises:
        UnsupportedModel: a group would lie on several ranks.
    """

    weight: Tensor

    def __init__(
        self,
        context: BuildContext,
        name: str,
        own: Part,
        eps: float,
        *,
        groups: int,
        norm_first: bool,
        shared: bool = False,
        activation: str = "silu",
    ) -> None:
        self.name = name
        self.ops = context.ops
        self.own, self.eps, self.norm_first = own, eps, norm_first
        self.shared, self.activation = shared, activation
        channels = own.size * own.shard.count
        if channels % groups or groups % own.shard.count:
            raise UnsupportedModel(
                f"{name}: {channels} channels in {groups} groups cannot be divided over "
                f"tensor_parallel_size = {own.shard.count}: it must divide the groups"
            )
        self.group_size = channels // groups

    def slots(self) -> Mapping[str, Slot]:
        if self.shared:
            return {"weight": Slot((self.group_size,))}
        return {"weight": Slot((self.own.size,), parts=(self.own,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"]

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [T, C] -> the same shape."""
        return self.ops.gated_rms_norm(
            x,
            gate,
            self.weight,
            self.eps,
            group_size=self.group_size,
            norm_first=self.norm_first,
            activation=self.activation,
        )
