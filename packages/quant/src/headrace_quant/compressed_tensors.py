"""``compressed-tensors``: the container that llm-compressor writes; here its weight-only int8.

Served: integer weights of 8 bits, symmetric, one scale per output, activations untouched, in the
formats ``int-quantized`` (``weight`` int8 [N, K]) and ``pack-quantized`` (``weight_packed`` int32
[N, K/4]: value + 128, four to a word, lowest byte first), each with ``weight_scale`` [N, 1].
Everything else that the container can say is refused by key and value.
Source: github.com/vllm-project/compressed-tensors (documentation of the formats).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import ConfigError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed, TensorSpec
from headrace_core.ops import OpTable, PackedLinear
from headrace_quant.ignoring import is_ignored, matches, module_names
from headrace_quant.int8 import Int8Weight, checked_scales
from headrace_quant.none import PlainWeight

if TYPE_CHECKING:
    from torch import Tensor

LINEAR_CLASS = "Linear"


class PackedInt8Weight(LinearMethod):
    """``pack-quantized`` with 8 bits."""

    def __init__(self, ops: OpTable) -> None:
        self.ops = ops

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        if spec.in_features % 4:
            raise ConfigError(
                f"layer {spec.name!r}: in_features = {spec.in_features}: format 'pack-quantized' "
                "is served for multiples of 4 only"
            )
        return {
            "weight_packed": TensorSpec(
                (spec.out_features, spec.in_features // 4), "int32", in_dim=1
            ),
            "weight_scale": TensorSpec((spec.out_features, 1), None),
        }

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        words = tensors["weight_packed"].contiguous()
        weight = (words.view(torch.uint8).to(torch.int16) - 128).to(torch.int8)
        scales = checked_scales(spec, tensors["weight_scale"])
        return self.ops.int8_linear.pack(weight, scales, spec.dtype)

    def apply(self, state: PackedLinear, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.ops.int8_linear(x, state, bias)


_FORMATS: Mapping[str, Callable[[OpTable], LinearMethod]] = {
    "int-quantized": Int8Weight,
    "pack-quantized": PackedInt8Weight,
}

_WEIGHT_RULES: Mapping[str, tuple[object, ...]] = {
    "num_bits": (8,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("channel",),
    "group_size": (None,),
    "block_structure": (None,),
    "dynamic": (False,),
    "actorder": (None, False),
}
"""Key of a group's ``weights`` -> values that are served. Keys not listed do not change the
numbers (observers, dtypes of scales)."""

_WEIGHT_DEFAULTS: Mapping[str, object] = {"type": "int", "symmetric": True, "dynamic": False}


class CompressedTensors(QuantMethod):
    """See the module's docstring.

    Args:
        groups: (targets, format) in the checkpoint's order.
        ignore: names or patterns of layers that stay plain.
    """

    name: ClassVar[str] = "compressed-tensors"

    def __init__(
        self,
        ops: OpTable,
        groups: tuple[tuple[tuple[str, ...], str], ...],
        ignore: tuple[str, ...],
    ) -> None:
        self.ops = ops
        self.groups = groups
        self.ignore = ignore

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> CompressedTensors:
        if config is None:
            raise ConfigError(
                "quantization 'compressed-tensors' needs a checkpoint made for it; 'int8' "
                "quantizes while loading",
                field="model.quantization",
            )
        for key in ("kv_cache_scheme", "sparsity_config"):
            if config.get(key):
                raise _refusal(key, config[key], "absent")
        status = config.get("quantization_status", "compressed")
        if status != "compressed":
            raise _refusal("quantization_status", status, "'compressed'")
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise _refusal("config_groups", groups, "an object with at least one group")
        return cls(
            ops,
            tuple(_group(name, group, config.get("format")) for name, group in groups.items()),
            tuple(_names("ignore", config.get("ignore") or [])),
        )

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        if is_ignored(spec, self.ignore):
            return PlainWeight(self.ops)
        chosen = {self._format_of(name) for name in module_names(spec)}
        if len(chosen) > 1:
            raise ConfigError(
                f"quantization_config: the parts {', '.join(module_names(spec))} of one layer are "
                f"stored differently: {chosen}; they must be alike"
            )
        (form,) = chosen
        return PlainWeight(self.ops) if form is None else _FORMATS[form](self.ops)

    def _format_of(self, name: str) -> str | None:
        """By the most specific target: the name, then a pattern, then the class."""
        for is_meant in (_is_named, _is_matched, _is_of_class):
            for targets, form in self.groups:
                if any(is_meant(target, name) for target in targets):
                    return form
        return None


def _is_named(target: str, name: str) -> bool:
    return target == name


def _is_matched(target: str, name: str) -> bool:
    return target.startswith("re:") and matches(target, name)


def _is_of_class(target: str, name: str) -> bool:
    return target == LINEAR_CLASS  # only linear layers are asked for


def _group(name: str, group: object, default_format: object) -> tuple[tuple[str, ...], str]:
    path = f"config_groups.{name}"
    if not isinstance(group, Mapping):
        raise _refusal(path, group, "an object")
    for key in ("input_activations", "output_activations"):
        if group.get(key):
            raise _refusal(f"{path}.{key}", group[key], "null: only weights are quantized here")
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise _refusal(f"{path}.weights", weights, "an object")
    for key, served in _WEIGHT_RULES.items():
        value = weights.get(key, _WEIGHT_DEFAULTS.get(key))
        if value not in served:
            raise _refusal(f"{path}.weights.{key}", value, " or ".join(map(repr, served)))
    form = group.get("format") or default_format
    if form not in _FORMATS:
        raise _refusal(f"{path}.format", form, " or ".join(map(repr, _FORMATS)))
    return tuple(_names(f"{path}.targets", group.get("targets") or [])), str(form)


def _names(key: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _refusal(key, value, "a list of names")
    return value


def _refusal(key: str, value: object, accepted: str) -> ConfigError:
    return ConfigError(f"quantization_config: {key} = {value!r}: must be {accepted}")
