"""``mxfp4``: experts whose weights are 4-bit floats in blocks of 32 with a scale, as gpt-oss has them.

Source: OCP Microscaling Formats (MX) specification 1.0, the element format E2M1 and the scale format
E8M0; layout: OpenAI 2025, arXiv:2508.10925. The weights become floats of the activations' dtype while
loading, which 4 bits and a power of two fit without loss in bfloat16 and float32; nothing is multiplied
in 4 bits. Layers that ``modules_to_not_convert`` names, and all that are no experts, are floats in the
checkpoint, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import ConfigError, UnsupportedModel, WeightsError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed, TensorSpec
from headrace_core.ops import OpTable
from headrace_quant.config_checks import listed_names
from headrace_quant.ignored_layers import module_names
from headrace_quant.none import PlainWeight

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32
"""Values that share a scale."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NO_NUMBER = 127, 255
_EXPERT = re.compile(r"\.experts\.\d+\.")
_KNOWN = ("quant_method", "modules_to_not_convert")


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks [N, K / 32, 16] uint8, two values a byte, the lower half first; scales [N, K / 32] uint8,
    exponents of 2 plus 127 -> [N, K]."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32)
    table = values.to(blocks.device)
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1)  # [N, K / 32, 16, 2]
    exact = torch.ldexp(table[pairs.flatten(2).int()], scales[..., None].int() - _BIAS)
    return exact.flatten(1).to(dtype)


class Mxfp4Weight(PlainWeight):
    """``weight_blocks`` and ``weight_scales``, which become a plain weight."""

    def __init__(self, ops: OpTable) -> None:
        super().__init__(ops)
        self.takes_views = True

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        if spec.in_features % BLOCK:
            raise UnsupportedModel(
                f"{spec.name}: mxfp4 has blocks of {BLOCK} inputs; this rank has {spec.in_features}"
            )
        outputs, blocks = spec.out_features, spec.in_features // BLOCK
        return {
            "weight_blocks": TensorSpec((outputs, blocks, BLOCK // 2), "uint8", in_dim=1),
            "weight_scales": TensorSpec((outputs, blocks), "uint8", in_dim=1),
        }

    def weight(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> Tensor:
        scales = tensors["weight_scales"]
        if bool((scales == _NO_NUMBER).any()):
            raise WeightsError(f"{spec.name}: a scale of its mxfp4 weight is not a number")
        return dequantize(tensors["weight_blocks"], scales, getattr(torch, spec.dtype))

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> Any:
        return super().finish(spec, {"weight": self.weight(spec, tensors)})


class Mxfp4(QuantMethod):
    """Experts in blocks, everything else plain."""

    name: ClassVar[str] = "mxfp4"

    def __init__(self, ops: OpTable, ignore: Sequence[str]) -> None:
        self.ops, self.ignore = ops, [_pattern(entry) for entry in ignore]

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> Mxfp4:
        if config is None:
            raise ConfigError(
                "quantization 'mxfp4' needs a checkpoint made with it", field="model.quantization"
            )
        unknown = sorted(key for key in config if key not in _KNOWN and config[key] is not None)
        key = "modules_to_not_convert"
        if unknown:
            raise ConfigError(f"quantization_config: {', '.join(unknown)}: mxfp4 has no such key")
        return cls(ops, listed_names(key, config.get(key) or []))

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        """float16 cannot hold all of the scales."""
        if need.dtype == "float16":
            return ["dtype 'float16' cannot hold mxfp4's range; use bfloat16 or float32"]
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        names = module_names(spec)
        ignored = any(entry.match(name) for entry in self.ignore for name in names)
        if ignored or not all(_EXPERT.search(name) for name in names):
            return PlainWeight(self.ops)
        return Mxfp4Weight(self.ops)


def _pattern(entry: str) -> re.Pattern[str]:
    """A name or the beginning of one, with ``*`` for anything."""
    return re.compile(".*".join(map(re.escape, entry.split("*"))) + r"(\.|$)")
