"""``compressed-tensors``: the container that llm-compressor writes; here its integers and its FP8.

- ``int-quantized``: ``weight`` int8 [N, K], ``weight_scale`` [N, 1]; activations untouched (W8A16)
  or in int8 with a scale per token that is found at run time (W8A8).
- ``pack-quantized``: 4 or 8 bits in words, a scale per output or per group of inputs, with or
  without zero points; activations untouched (W4A16, W8A16).

- ``float-quantized``, ``naive-quantized``: ``weight`` float8_e4m3fn [N, K], ``weight_scale`` of one number,
  [N, 1], or of blocks. Such weights become floats while they are loaded
  (:mod:`headrace_quant.fp8_tensors`), and activations are never rounded, whatever the container says.

Everything else that the container can say is refused by key and value.
Source: github.com/vllm-project/compressed-tensors (documentation of the formats).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import ConfigError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed
from headrace_core.ops import OpTable
from headrace_quant.config_checks import listed_names, refusal
from headrace_quant.fp8_tensors import Fp8Layout, decode_fp8
from headrace_quant.ignored_layers import matches
from headrace_quant.int_linear_methods import PackedWords, StoredInt8, WordFormat
from headrace_quant.none import PlainWeight
from headrace_quant.parted import method_by_name

if TYPE_CHECKING:
    from torch import Tensor

LINEAR_CLASS = "Linear"

_DEFAULTS: Mapping[str, object] = {"type": "int", "symmetric": True, "dynamic": False}

_COMMON: Mapping[str, tuple[object, ...]] = {
    "type": ("int",),
    "block_structure": (None,),
    "dynamic": (False,),
    "actorder": (None, False, "weight", "static"),
}
"""Key of a group's ``weights`` -> values that are served, in both formats. Keys not listed do not
change the numbers (observers, dtypes of scales). An ``actorder`` other than ``group`` is how the
weights were found, and leaves no trace in them."""

_WEIGHTS: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "int-quantized": {
        **_COMMON,
        "num_bits": (8,),
        "symmetric": (True,),
        "strategy": ("channel",),
        "group_size": (None, -1),
    },
    "pack-quantized": {
        **_COMMON,
        "num_bits": (4, 8),
        "symmetric": (True, False),
        "strategy": ("channel", "group"),
    },
}

_FP8: Mapping[str, tuple[object, ...]] = {
    "type": ("float",),
    "num_bits": (8,),
    "symmetric": (True,),
    "dynamic": (False,),
    "strategy": ("tensor", "channel", "block"),
    "actorder": (None, False),
}
"""The same in the formats of :data:`_FP8_FORMATS`."""
_FP8_FORMATS = ("float-quantized", "naive-quantized")
_ANY_COLUMNS = 1 << 62
"""Columns of a scale that is a whole row's."""

_ACTIVATIONS: Mapping[str, tuple[object, ...]] = {
    "num_bits": (8,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("token",),
    "group_size": (None, -1),
    "block_structure": (None,),
    "dynamic": (True,),
    "actorder": (None, False),
}
"""The same of ``input_activations``."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """Storage and multiplication of the layers of a group."""

    activations: str
    words: WordFormat | None = None
    """None: ``int-quantized``, or FP8."""
    fp8: Fp8Layout | None = None

    def method(self, ops: OpTable) -> LinearMethod:
        if self.fp8 is not None:
            return PlainWeight(ops)
        if self.words is None:
            return StoredInt8(ops, activations=self.activations)
        return PackedWords(ops, self.words, activations=self.activations)


class CompressedTensors(QuantMethod):
    """The container that llm-compressor writes: integers with scales.

    Args:
        groups: (targets, scheme) in the checkpoint's order.
        ignore: names or patterns of layers that stay plain.
    """

    name: ClassVar[str] = "compressed-tensors"

    def __init__(
        self,
        ops: OpTable,
        groups: tuple[tuple[tuple[str, ...], Scheme], ...],
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
                raise refusal(key, config[key], "absent")
        status = config.get("quantization_status", "compressed")
        if status != "compressed":
            raise refusal("quantization_status", status, "'compressed'")
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise refusal("config_groups", groups, "an object with at least one group")
        return cls(
            ops,
            tuple(_group(name, group, config.get("format")) for name, group in groups.items()),
            tuple(listed_names("ignore", config.get("ignore") or [])),
        )

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        return method_by_name(spec, self._scheme_of, self._method)

    def _method(self, scheme: Scheme | None) -> LinearMethod:
        return PlainWeight(self.ops) if scheme is None else scheme.method(self.ops)

    def decode(
        self,
        tensors: Iterable[tuple[str, Tensor, Path]],
        dtype: str,
        passes_over: Callable[[str], bool],
    ) -> Iterable[tuple[str, Tensor, Path]]:
        """See :meth:`headrace_core.linear.QuantMethod.decode`: of modules in FP8."""
        if all(scheme.fp8 is None for _, scheme in self.groups):
            return tensors
        kind = getattr(torch, dtype)
        return decode_fp8(tensors, kind, self._fp8_of, passes_over=passes_over)

    def _fp8_of(self, name: str) -> Fp8Layout | None:
        scheme = self._scheme_of(name)
        return None if scheme is None else scheme.fp8

    def _scheme_of(self, name: str) -> Scheme | None:
        """By the most specific target: the name, then a pattern, then the class; None: in floats."""
        if any(matches(entry, name) for entry in self.ignore):
            return None
        for is_meant in (_is_named, _is_matched, _is_of_class):
            for targets, scheme in self.groups:
                if any(is_meant(target, name) for target in targets):
                    return scheme
        return None


def _is_named(target: str, name: str) -> bool:
    return target == name


def _is_matched(target: str, name: str) -> bool:
    return target.startswith("re:") and matches(target, name)


def _is_of_class(target: str, name: str) -> bool:
    return target == LINEAR_CLASS  # only linear layers are asked for


def _group(name: str, group: object, default_format: object) -> tuple[tuple[str, ...], Scheme]:
    path = f"config_groups.{name}"
    if not isinstance(group, Mapping):
        raise refusal(path, group, "an object")
    form = group.get("format") or default_format
    if not isinstance(form, str) or form not in (*_WEIGHTS, *_FP8_FORMATS):
        accepted = " or ".join(map(repr, (*_WEIGHTS, *_FP8_FORMATS)))
        raise refusal(f"{path}.format", form, accepted)
    if group.get("output_activations"):
        raise refusal(f"{path}.output_activations", group["output_activations"], "null")
    inputs = group.get("input_activations")
    targets = tuple(listed_names(f"{path}.targets", group.get("targets") or []))
    if form in _FP8_FORMATS:
        return targets, Scheme("float", fp8=_fp8(path, group, inputs))
    if inputs and form == "pack-quantized":
        raise refusal(f"{path}.input_activations", inputs, "null in format 'pack-quantized'")
    if inputs:
        _check(f"{path}.input_activations", inputs, _ACTIVATIONS)
    weights = _check(f"{path}.weights", group.get("weights"), _WEIGHTS[form])
    words = _words(f"{path}.weights", weights) if form == "pack-quantized" else None
    return targets, Scheme("int8" if inputs else "float", words)


def _fp8(path: str, group: Mapping[str, Any], inputs: object) -> Fp8Layout:
    """The layout of a group's weights in FP8."""
    weights = _check(f"{path}.weights", group.get("weights"), _FP8)
    if inputs:
        _check(f"{path}.input_activations", inputs, {"type": ("float",), "num_bits": (8,)})
    strategy, block = weights["strategy"], None
    if strategy == "channel":
        block = 1, _ANY_COLUMNS
    elif strategy == "block":
        sizes = weights.get("block_structure")
        if not (
            isinstance(sizes, list)
            and len(sizes) == 2
            and all(type(size) is int and size > 0 for size in sizes)
        ):
            raise refusal(f"{path}.weights.block_structure", sizes, "a list of two sizes")
        block = sizes[0], sizes[1]
    return Fp8Layout(block, has_activation_scales=True)


def _check(path: str, found: object, rules: Mapping[str, tuple[object, ...]]) -> Mapping[str, Any]:
    """The arguments object at ``path``, if all that it says is served."""
    if not isinstance(found, Mapping):
        raise refusal(path, found, "an object")
    for key, served in rules.items():
        value = found.get(key, _DEFAULTS.get(key))
        if not any(value == one and type(value) is type(one) for one in served):
            raise refusal(f"{path}.{key}", value, " or ".join(map(repr, served)))
    return found


def _words(path: str, weights: Mapping[str, Any]) -> WordFormat:
    size, by_group = weights.get("group_size"), weights["strategy"] == "group"
    if by_group and not (type(size) is int and size > 0 and size % 8 == 0):
        raise refusal(f"{path}.group_size", size, "a multiple of 8 with strategy 'group'")
    if not by_group and size not in (None, -1):
        raise refusal(f"{path}.group_size", size, "null with strategy 'channel'")
    has_zeros = not weights.get("symmetric", True)
    return WordFormat(weights["num_bits"], size if by_group else None, has_zeros)
