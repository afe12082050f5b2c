"""``bitnet``: weights of -1, 0 and 1 with one scale for each matrix, activations in int8 with a scale for
each token. Ma et al. 2024, arXiv:2402.17764; Wang et al. 2025, arXiv:2504.12285.

Checkpoints are in one of three ways, which ``linear_class`` and ``quantization_mode`` tell apart:

- packed (``bitlinear``, or ``autobitlinear`` ``offline``): ``weight`` uint8 [N / 4, K], four codes of two
  bits a byte, the lowest being row n, the next row n + N / 4 and so on, each a weight plus 1; and
  ``weight_scale`` [1], which weights are multiplied by, or divided by in ``bitlinear``;
- ``autobitlinear`` ``online``: floats, which are rounded while they are loaded to multiples of their mean
  magnitude.

Layers that ``modules_to_not_convert`` names, and the head, are plain floats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import ConfigError, UnsupportedModel, WeightsError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed, TensorSpec
from headrace_core.ops import OpTable, PackedLinear, QuantizedWeight
from headrace_quant.config_checks import listed_names, refusal
from headrace_quant.ignored_layers import is_listed
from headrace_quant.int_linear_methods import IntegerMethod, scale_spec
from headrace_quant.none import PlainWeight
from headrace_quant.parted import method_by_name

if TYPE_CHECKING:
    from torch import Tensor

HEAD = "lm_head"
CODES = 4
"""In a byte."""
_LEAST = 1e-5
"""Least mean magnitude."""
_KNOWN = (
    "quant_method", "linear_class", "quantization_mode", "use_rms_norm", "rms_norm_eps",
    "modules_to_not_convert",
)  # fmt: skip


def unpack_ternary(packed: Tensor) -> Tensor:
    """packed [N / 4, K] uint8 -> [N, K] int8 of -1, 0 and 1; a code of 3 becomes 2."""
    return torch.cat([(packed >> 2 * place & 3).to(torch.int8) - 1 for place in range(CODES)])


class TernaryMethod(IntegerMethod):
    """Shared parts of both methods. The scale is of a whole matrix, so there is one rank."""

    needs_whole: ClassVar[bool] = True

    def __init__(self, ops: OpTable) -> None:
        super().__init__(ops, activations="int8")

    def pack_parts(
        self, spec: LinearSpec, values: Sequence[Tensor], scales: Sequence[float]
    ) -> PackedLinear:
        """values [N, K] int8 and a scale for each fused part."""
        for scale in scales:
            if not 0 <= scale < float("inf"):
                raise WeightsError(f"layer {spec.name!r}: weight_scale = {scale}: is not a scale")
        sizes = torch.tensor(spec.out_parts)
        by_row = torch.tensor(scales, dtype=torch.float32).repeat_interleave(sizes)[:, None]
        whole = torch.cat(list(values))
        return self.pack(spec, QuantizedWeight(whole, by_row.to(whole.device)))


class PackedTernary(TernaryMethod):
    """``weight`` and ``weight_scale``.

    Args:
        divides: weights are divided by the scale.
    """

    def __init__(self, ops: OpTable, *, divides: bool) -> None:
        super().__init__(ops)
        self.divides = divides

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        if any(part % CODES for part in spec.out_parts):
            raise UnsupportedModel(
                f"{spec.name}: {list(spec.out_parts)} outputs cannot be packed {CODES} to a byte"
            )
        rows = spec.out_features // CODES
        scale = scale_spec((len(spec.out_parts),), None)
        return {
            "weight": TensorSpec((rows, spec.in_features), "uint8"),
            "weight_scale": TensorSpec(
                scale.shape, scale.dtype, any_float=scale.any_float, by_part=True
            ),
        }

    def kept_bytes(self, spec: LinearSpec) -> int:
        return spec.out_features * spec.in_features + 4 * spec.out_features

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        parts = torch.split(tensors["weight"], [part // CODES for part in spec.out_parts])
        values = [unpack_ternary(part) for part in parts]
        if any(bool((part > 1).any()) for part in values):
            raise WeightsError(f"layer {spec.name!r}: weight holds codes that are not -1, 0 or 1")
        scales = [float(scale) for scale in tensors["weight_scale"]]
        if self.divides:
            scales = [1 / scale if scale else float("inf") for scale in scales]
        return self.pack_parts(spec, values, scales)


class RoundedTernary(TernaryMethod):
    """``weight`` of any floating dtype, rounded when it has arrived."""

    takes_views = True

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        return {"weight": TensorSpec((spec.out_features, spec.in_features), None)}

    def kept_bytes(self, spec: LinearSpec) -> int:
        return spec.out_features * spec.in_features + 4 * spec.out_features

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        values, scales = [], []
        for part in torch.split(tensors["weight"], list(spec.out_parts)):
            mean = part.float().abs().mean().clamp(min=_LEAST)
            if not bool(mean.isfinite()):
                raise WeightsError(f"layer {spec.name!r}: the weight holds infinities or NaN")
            values.append((part.float() * (1 / mean)).round().clamp(-1, 1).to(torch.int8))
            scales.append(float(mean))
        return self.pack_parts(spec, values, scales)


class BitNet(QuantMethod):
    """Weights of -1, 0 and 1 with one scale for each matrix."""

    name: ClassVar[str] = "bitnet"

    def __init__(self, ops: OpTable, method: LinearMethod, plain: tuple[str, ...]) -> None:
        self.ops, self.method, self.plain = ops, method, plain

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> BitNet:
        if config is None:
            raise ConfigError(
                "quantization = 'bitnet': needs a checkpoint that was trained so (its config.json has "
                "a quantization_config)"
            )
        unknown = [key for key in config if key not in _KNOWN]
        if unknown:
            raise ConfigError(f"quantization_config: unknown keys {unknown} for bitnet")
        kind, mode = (
            config.get("linear_class", "bitlinear"),
            config.get("quantization_mode", "offline"),
        )
        for key, value, known in (
            ("linear_class", kind, ("bitlinear", "autobitlinear")),
            ("quantization_mode", mode, ("online", "offline")),
            ("use_rms_norm", config.get("use_rms_norm", False), (False,)),
        ):
            if value not in known:
                raise refusal(key, value, " or ".join(map(repr, known)))
        key = "modules_to_not_convert"
        skip = listed_names(key, config.get(key) or [])
        method: LinearMethod = PackedTernary(ops, divides=kind == "bitlinear")
        if kind == "autobitlinear" and mode == "online":
            method = RoundedTernary(ops)
        return cls(ops, method, tuple(skip))

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        return method_by_name(
            spec, self._is_left, lambda is_left: PlainWeight(self.ops) if is_left else self.method
        )

    def _is_left(self, name: str) -> bool:
        return name.rpartition(".")[2] == HEAD or is_listed(name, self.plain)
