"""Forms in which activations enter packed weights: those that formats name, replaced by what the user chose
or by what the device multiplies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headrace_core.errors import ConfigError
from headrace_core.linear import QuantNeed
from headrace_core.ops import (
    QUANT_ACTIVATIONS,
    PackedLinear,
    QuantizedWeight,
    QuantLinearOp,
    Rounding,
)

if TYPE_CHECKING:
    from torch import Tensor


FIELD = "model.quantization_activations"
FP8_UNITS = (8, 9)
"""Least compute capability of an NVIDIA GPU that multiplies FP8 (Ada; Hopper has 9.0)."""


def has_fp8_units(need: QuantNeed) -> bool:
    """True if the device multiplies E4M3 by E4M3: NVIDIA's, as a capability is only theirs."""
    return need.device == "cuda" and (need.device_capability or (0, 0)) >= FP8_UNITS


def forms_for(need: QuantNeed, chosen: str) -> Mapping[str, str]:
    """Form that a format names -> form to pack for, where they differ.

    Args:
        chosen: one of :data:`headrace_core.ops.QUANT_ACTIVATIONS`, or ``auto``: what the format names, if
            the device multiplies it.

    Raises:
        ConfigError: FP8 was chosen for a device that does not multiply it. (On a CPU the kernels decide: the
            reference computes it.)
    """
    if chosen == "auto":
        return {} if has_fp8_units(need) else {"fp8": "float"}
    if chosen == "fp8" and need.device != "cpu" and not has_fp8_units(need):
        capability = need.device_capability
        of = "" if capability is None else " of capability {}.{}".format(*capability)
        raise ConfigError(
            f"{FIELD} = 'fp8': device {need.device!r}{of} multiplies no FP8: it takes an NVIDIA GPU of "
            "capability 8.9 or more; here it must be 'auto', 'float' or 'int8'",
            field=FIELD,
        )
    return dict.fromkeys(QUANT_ACTIVATIONS, chosen)


class ActivationForms:
    """A :class:`headrace_core.ops.QuantLinearOp` that packs for other forms than those it is asked for.

    Args:
        op: packs and multiplies.
        forms: form that is asked for -> form to pack for; what is left out stays.
    """

    def __init__(self, op: QuantLinearOp, forms: Mapping[str, str]) -> None:
        self._op, self._forms = op, forms

    def pack(self, weight: QuantizedWeight, dtype: str, *, activations: str) -> PackedLinear:
        form = self._forms.get(activations, activations)
        return self._op.pack(weight, dtype, activations=form)

    def round(
        self, weight: Tensor, dtype: str, rounding: Rounding, *, activations: str
    ) -> PackedLinear:
        form = self._forms.get(activations, activations)
        return self._op.round(weight, dtype, rounding, activations=form)

    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        return self._op(x, packed, bias)

    def gated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        return self._op.gated(x, packed, kind, bias)

    def rows(self, ids: Tensor, packed: PackedLinear) -> Tensor:
        return self._op.rows(ids, packed)

    def join(self, each: Sequence[PackedLinear]) -> PackedLinear | None:
        return self._op.join(each)

    def routed(
        self,
        x: Tensor,
        packed: PackedLinear,
        ids: Tensor,
        weights: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        return self._op.routed(x, packed, ids, weights, biases)
