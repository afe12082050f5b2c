"""``none``: weights as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.errors import ConfigError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed, TensorSpec
from headrace_core.ops import OpTable, PackedLinear

if TYPE_CHECKING:
    from torch import Tensor


class PlainWeight(LinearMethod):
    """``weight`` [N, K] through :class:`headrace_core.ops.LinearOp`."""

    is_plain: ClassVar[bool] = True

    def __init__(self, ops: OpTable) -> None:
        self.ops = ops
        self.adopts_packed = type(self).finish is PlainWeight.finish
        self.takes_views = ops.linear.pack_copies

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        return {"weight": TensorSpec((spec.out_features, spec.in_features), None, in_dim=1)}

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        return self.ops.linear.pack(tensors["weight"])

    def adopt(self, packed: PackedLinear) -> PackedLinear:
        return packed

    def apply(self, state: PackedLinear, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.ops.linear(x, state, bias)

    def apply_activated(
        self,
        ops: OpTable,
        state: PackedLinear,
        x: Tensor,
        kind: str,
        bias: Tensor | None = None,
    ) -> Tensor:
        return ops.linear.activated(x, state, kind, bias)

    def apply_gated(
        self,
        ops: OpTable,
        state: PackedLinear,
        x: Tensor,
        kind: str,
        bias: Tensor | None = None,
    ) -> Tensor:
        return ops.linear.gated(x, state, kind, bias)


class Unquantized(QuantMethod):
    """Every layer plain."""

    name: ClassVar[str] = "none"

    def __init__(self, ops: OpTable) -> None:
        self.ops = ops

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> Unquantized:
        if config is not None:
            raise ConfigError(
                f"quantization 'none' cannot read a checkpoint whose quant_method is "
                f"{config.get('quant_method')!r}",
                field="model.quantization",
            )
        return cls(ops)

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        return PlainWeight(self.ops)
