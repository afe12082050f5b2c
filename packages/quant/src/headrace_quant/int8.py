"""``int8``: weights as int8 with one scale per output, activations untouched.

Two ways in: quantize an ordinary checkpoint while it is loaded (each row's largest magnitude maps
to 127), or read one that stores ``weight`` int8 [N, K] and ``weight_scale`` [N, 1] and says
``{"quant_method": "int8"}``. Half the memory of 16-bit weights; a row's error is at most half a
step, 1/254 of its largest weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed, TensorSpec
from headrace_core.ops import OpTable, PackedLinear
from headrace_quant.ignoring import is_ignored
from headrace_quant.none import PlainWeight

if TYPE_CHECKING:
    from torch import Tensor

ALWAYS_PLAIN = ("lm_head",)
"""Left as they are unless a checkpoint says otherwise: rounding the head costs most accuracy."""


class Int8Weight(LinearMethod):
    """``weight`` int8 [N, K] and ``weight_scale`` [N, 1] from the checkpoint."""

    def __init__(self, ops: OpTable) -> None:
        self.ops = ops

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        return {
            "weight": TensorSpec((spec.out_features, spec.in_features), "int8", in_dim=1),
            "weight_scale": TensorSpec((spec.out_features, 1), None),
        }

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        scales = checked_scales(spec, tensors["weight_scale"])
        return self.ops.int8_linear.pack(tensors["weight"], scales, spec.dtype)

    def apply(self, state: PackedLinear, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.ops.int8_linear(x, state, bias)


class OnlineInt8Weight(Int8Weight):
    """``weight`` of any floating dtype, rounded to int8 when it has arrived."""

    takes_views = True

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        return {"weight": TensorSpec((spec.out_features, spec.in_features), None, in_dim=1)}

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        weight, scales = quantize_rows(tensors["weight"])
        checked_scales(spec, scales)
        return self.ops.int8_linear.pack(weight, scales, spec.dtype)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> int8 [N, K] in [-127, 127] and scales [N] float32; symmetric, by row."""
    wide = weight.float()
    largest = wide.abs().amax(dim=1)
    scales = torch.where(largest > 0, largest / 127, 1.0)  # a row of zeros stays zeros
    return (wide / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def checked_scales(spec: LinearSpec, scales: Tensor) -> Tensor:
    """[N] float32.

    Raises:
        WeightsError: a scale is negative, infinite or no number.
    """
    flat = scales.flatten().float()
    if not bool((flat.isfinite() & (flat >= 0)).all()):
        raise WeightsError(f"layer {spec.name!r}: weight_scale holds values that are no scales")
    return flat


class Int8(QuantMethod):
    """Every linear layer in int8 but those that are ignored.

    Args:
        stored: the checkpoint holds int8 already.
        ignore: names, or patterns after ``re:``, of layers that stay plain.
    """

    name: ClassVar[str] = "int8"

    def __init__(
        self, ops: OpTable, *, stored: bool = False, ignore: tuple[str, ...] = ALWAYS_PLAIN
    ) -> None:
        self.ops = ops
        self.stored = stored
        self.ignore = ignore

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> Int8:
        if config is None:
            return cls(ops)
        accepted = ("quant_method", "ignore")
        for key in config:
            if key not in accepted:
                raise ConfigError(
                    f"quantization_config: {key} = {config[key]!r}: 'int8' takes only "
                    f"{' and '.join(accepted)}"
                )
        if config.get("quant_method") != cls.name:
            raise ConfigError(
                f"quantization_config: quant_method = {config.get('quant_method')!r}: must be 'int8'"
            )
        ignore = config.get("ignore", list(ALWAYS_PLAIN))
        if not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
            raise ConfigError(f"quantization_config: ignore = {ignore!r}: must be a list of names")
        return cls(ops, stored=True, ignore=tuple(ignore))

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        if is_ignored(spec, self.ignore):
            return PlainWeight(self.ops)
        return Int8Weight(self.ops) if self.stored else OnlineInt8Weight(self.ops)
