"""``compressed-tensors``: the container that llm-compressor writes.

A linear layer with K inputs and N outputs has

========================================  ==========================================================
``int-quantized``                         ``weight`` int8 [N, K], ``weight_scale`` of outputs [N, 1], of
                                          groups [N, K / G] or of the module [1]; ``weight_zero_point``
                                          int8
``pack-quantized``                        ``weight_packed`` int32, 2 to 8 bits; zero points packed as well
``float-quantized``, ``naive-quantized``  ``weight`` float8_e4m3fn [N, K], ``weight_scale`` [1], [N, 1], or
                                          of blocks
``nvfp4-pack-quantized``                  ``weight_packed`` uint8 [N, K / 2], ``weight_scale`` float8_e4m3fn
                                          [N, K / 16], ``weight_global_scale`` [1], which divides
``mxfp4-``, ``mxfp6-pack-quantized``      ``weight_packed`` uint8, ``weight_scale`` uint8 [N, K / 32] (E8M0)
``mxfp8-quantized``                       ``weight`` float8_e4m3fn, ``weight_scale`` uint8 [N, K / 32]
========================================  ==========================================================

Activations of integers stay as they are or become int8 (W8A8, W4A8): with a scale per token that is found at
run time, or a module's own ``input_scale`` [1], and ``input_zero_point`` if they are not symmetric. Those of
floats stay as they are, whatever the container says: only weights are small; but with FP8 weights and a
dynamic scale per token they are ``fp8`` (:data:`headrace_core.ops.QUANT_ACTIVATIONS`). FP8 stays packed where
its blocks allow it (:mod:`headrace_quant.fp8.layers`), else it becomes floats while it is loaded.

Everything else that the container can say is refused by key and value.
Source: github.com/vllm-project/compressed-tensors (its compressors).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from headrace_core.errors import ConfigError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed
from headrace_core.ops import OpTable
from headrace_quant.config_checks import listed_names, refusal, warn_of_unknown
from headrace_quant.fp8.layers import Fp8Layers
from headrace_quant.fp8.tensors import Fp8Layout, decode_fp8
from headrace_quant.ignored_layers import PartCounts, matches, module_names
from headrace_quant.integer_inputs import SCALE, ZERO, InputForm, IntegerInputs
from headrace_quant.none import PlainWeight
from headrace_quant.parted import method_by_name
from headrace_quant.small_floats import FloatLayout, SmallFloatWeight
from headrace_quant.stored_integers import ByteFormat, PackedWords, StoredInt8, WordFormat

if TYPE_CHECKING:
    from torch import Tensor

LINEAR_CLASS = "Linear"
_SCALES = "weight_scale"
_KNOWN = (
    "quant_method", "format", "quantization_status", "config_groups", "ignore", "kv_cache_scheme", "version",
    "sparsity_config", "transform_config", "global_compression_ratio",
)  # fmt: skip
"""Keys that llm-compressor writes."""
_REFUSED = {
    "sparsity_config": "sparse weights (2:4, bitmasks) are not read; decompress them first",
    "transform_config": "transforms of activations (Hadamard rotations) are not applied",
}
"""Key -> why it must be absent."""
_ACTIVATION_SCALES = ("input_global_scale", "input_scale", "input_zero_point")

_DEFAULTS: Mapping[str, object] = {"type": "int", "symmetric": True, "dynamic": False}

_COMMON: Mapping[str, tuple[object, ...]] = {
    "type": ("int",),
    "symmetric": (True, False),
    "block_structure": (None,),
    "dynamic": (False,),
}
"""Key of a group's ``weights`` -> values that are served, in both formats. Keys not listed do not
change the numbers (observers, dtypes of scales). An ``actorder`` other than ``group`` is how the
weights were found, and leaves no trace in them."""
_NO_TRACE = (None, False, "weight", "static")

_WEIGHTS: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "int-quantized": {
        **_COMMON,
        "num_bits": (4, 8),
        "strategy": ("tensor", "channel", "group"),
        "actorder": _NO_TRACE,
    },
    "pack-quantized": {
        **_COMMON,
        "num_bits": (2, 3, 4, 5, 6, 7, 8),
        "strategy": ("channel", "group"),
        "actorder": (*_NO_TRACE, "group"),
    },
}


class _SmallFloats(NamedTuple):
    """A format of floats with scales for groups."""

    layout: FloatLayout
    bits: int
    strategy: str = "group"


_FLOATS: Mapping[str, _SmallFloats] = {
    "nvfp4-pack-quantized": _SmallFloats(
        FloatLayout(
            scale_kind="e4m3", group_size=16, outer="weight_global_scale", outer_divides=True
        ),
        4,
        "tensor_group",
    ),
    "mxfp4-pack-quantized": _SmallFloats(FloatLayout(), 4),
    "mxfp6-pack-quantized": _SmallFloats(FloatLayout("e2m3"), 6),
    "mxfp8-quantized": _SmallFloats(FloatLayout("e4m3", "weight"), 8),
}
"""Format -> its layout."""

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
FORMATS = (*_WEIGHTS, *_FP8_FORMATS, *_FLOATS)
"""``format`` that is served."""
_ANY_COLUMNS = 1 << 62
"""Columns of a scale that is a whole row's."""

_ACTIVATIONS: Mapping[str, tuple[object, ...]] = {
    "num_bits": (8,),
    "type": ("int",),
    "symmetric": (True, False),
    "dynamic": (True, False),
    "group_size": (None, -1),
    "block_structure": (None,),
    "actorder": (None, False),
}
"""The same of ``input_activations``; a dynamic scale is of a token, a static one of a module."""


_CACHE: Mapping[str, tuple[object, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (True,),
    "strategy": (None, "tensor", "attn_head"),
    "dynamic": (False,),
}
"""The same of ``kv_cache_scheme``; the loader takes its scales where the cache is in FP8."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """Storage and multiplication of the layers of a group."""

    storage: ByteFormat | WordFormat | FloatLayout | Fp8Layout
    activations: str = "float"
    inputs: InputForm | None = None
    """Of activations that become integers by other rules than ``activations``."""

    def method(self, ops: OpTable) -> LinearMethod:
        match self.storage:
            case ByteFormat():
                method: LinearMethod = StoredInt8(ops, self.storage, activations=self.activations)
            case WordFormat():
                method = PackedWords(ops, self.storage, activations=self.activations)
            case FloatLayout():
                return SmallFloatWeight(ops, self.storage)
            case _:
                return PlainWeight(ops)
        return method if self.inputs is None else IntegerInputs(method, self.inputs, _SCALES)

    @property
    def fp8(self) -> Fp8Layout | None:
        """The layout of weights that become floats."""
        return self.storage if isinstance(self.storage, Fp8Layout) else None


class CompressedTensors(QuantMethod):
    """The container that llm-compressor writes.

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
        self.layers, self.parts = Fp8Layers(ops), PartCounts()
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
        warn_of_unknown(cls.name, config, _KNOWN)
        for key, why in _REFUSED.items():
            if config.get(key):
                raise refusal(key, config[key], f"absent: {why}")
        cache = config.get("kv_cache_scheme")
        if cache:
            _check("kv_cache_scheme", cache, _CACHE)
        status = config.get("quantization_status", "compressed")
        if status != "compressed":
            raise refusal("quantization_status", status, "'compressed'")
        groups = config.get("config_groups")
        if cache and groups is None:
            groups = {}
        if not isinstance(groups, Mapping) or not (groups or cache):
            raise refusal(
                "config_groups",
                groups,
                "an object with at least one group, or empty with kv_cache_scheme",
            )
        return cls(
            ops,
            tuple(_group(name, group, config.get("format")) for name, group in groups.items()),
            tuple(listed_names("ignore", config.get("ignore") or [])),
        )

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        self.parts.note(spec)

        def make(scheme: Scheme | None) -> LinearMethod:
            if scheme is None:
                return PlainWeight(self.ops)
            if scheme.fp8 is None:
                return scheme.method(self.ops)
            names = module_names(spec)
            ours = [name for name in names if self._scheme_of(name) == scheme]
            return self.layers.method(spec, ours if len(ours) < len(names) else None, scheme.fp8)

        return method_by_name(spec, self._scheme_of, make)

    def decode(
        self,
        tensors: Iterable[tuple[str, Tensor, Path]],
        dtype: str,
        passes_over: Callable[[str], bool],
    ) -> Iterable[tuple[str, Tensor, Path]]:
        """See :meth:`headrace_core.linear.QuantMethod.decode`: of modules in FP8. Scales of the
        activations of modules in other floats are passed over."""
        schemes = [scheme for _, scheme in self.groups]
        tensors = self._settled(tensors)
        if any(scheme.fp8 is not None for scheme in schemes):
            kind = getattr(torch, dtype)
            return decode_fp8(
                tensors, kind, self._fp8_of, passes_over=passes_over, keep=self.layers.kept
            )
        return tensors

    def _settled(
        self, tensors: Iterable[tuple[str, Tensor, Path]]
    ) -> Iterator[tuple[str, Tensor, Path]]:
        for name, tensor, file in tensors:
            module, _, last = name.rpartition(".")
            scheme = self._scheme_of(module)
            storage = None if scheme is None else scheme.storage
            if isinstance(storage, FloatLayout) and last in _ACTIVATION_SCALES:
                continue
            by_part: tuple[str | None, ...] = ()
            if isinstance(storage, FloatLayout):
                by_part = (storage.outer,)
            elif isinstance(storage, ByteFormat) and storage.of_module:
                by_part = (storage.scales, storage.zeros)
            if scheme is not None and scheme.inputs is not None:
                if last == ZERO and not scheme.inputs.has_zeros and not bool(tensor.any()):
                    continue
                by_part = (*by_part, SCALE, ZERO)
            yield name, self.parts.spread(module, tensor) if last in by_part else tensor, file

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
    if not isinstance(form, str) or form not in FORMATS:
        raise refusal(f"{path}.format", form, " or ".join(map(repr, FORMATS)))
    if group.get("output_activations"):
        raise refusal(f"{path}.output_activations", group["output_activations"], "null")
    inputs = group.get("input_activations")
    targets = tuple(listed_names(f"{path}.targets", group.get("targets") or []))
    if form in _FP8_FORMATS:
        return targets, Scheme(_fp8(path, group, inputs))
    if form in _FLOATS:
        return targets, Scheme(_small_floats(path, form, group, inputs))
    rounding = _inputs(f"{path}.input_activations", inputs) if inputs else None
    weights = _check(f"{path}.weights", group.get("weights"), _WEIGHTS[form])
    storage = (_words if form == "pack-quantized" else _octets)(f"{path}.weights", weights)
    if rounding == _BY_KERNEL:
        return targets, Scheme(storage, "int8")
    return targets, Scheme(storage, inputs=rounding)


_BY_KERNEL = InputForm(dynamic=True, has_zeros=False)
"""Form of activations that kernels round themselves."""


def _inputs(path: str, found: object) -> InputForm:
    """The form of a group's activations."""
    inputs = _check(path, found, _ACTIVATIONS)
    form = InputForm(bool(inputs.get("dynamic")), not inputs.get("symmetric", True))
    served = "token" if form.dynamic else "tensor"
    if (inputs.get("strategy") or served) != served:
        kind = "dynamic" if form.dynamic else "static"
        raise refusal(f"{path}.strategy", inputs["strategy"], f"{served!r} of {kind} activations")
    return form


def _small_floats(path: str, form: str, group: Mapping[str, Any], inputs: object) -> FloatLayout:
    """The layout of a group's weights in a format of :data:`_FLOATS`."""
    layout, bits, strategy = _FLOATS[form]
    rules: dict[str, tuple[object, ...]] = {
        "num_bits": (bits,), "type": ("float",), "symmetric": (True,), "dynamic": (False,),
        "strategy": (strategy,), "group_size": (layout.group_size,), "actorder": _NO_TRACE,
    }  # fmt: skip
    _check(f"{path}.weights", group.get("weights"), rules)
    if inputs:
        _check(f"{path}.input_activations", inputs, {"type": ("float",)})
    return layout


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
    return Fp8Layout(block, has_activation_scales=True, activations=_of_tokens(inputs))


def _of_tokens(inputs: object) -> str:
    """``fp8`` if a group's activations in FP8 have a symmetric scale for each token, found at run time."""
    if not isinstance(inputs, Mapping) or not inputs:
        return "float"
    found = inputs.get("dynamic"), inputs.get("strategy"), inputs.get("symmetric", True)
    return "fp8" if found == (True, "token", True) else "float"


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
    size = _group_size(path, weights)
    has_zeros = not weights.get("symmetric", True)
    by_importance = weights.get("actorder") == "group" and size is not None
    return WordFormat(weights["num_bits"], size, has_zeros, by_importance)


def _octets(path: str, weights: Mapping[str, Any]) -> ByteFormat:
    size = _group_size(path, weights)
    of_module = weights["strategy"] == "tensor"
    return ByteFormat(weights["num_bits"], size, of_module, not weights.get("symmetric", True))


def _group_size(path: str, weights: Mapping[str, Any]) -> int | None:
    size, strategy = weights.get("group_size"), weights["strategy"]
    if strategy == "group":
        if not (type(size) is int and size > 0 and size % 8 == 0):
            raise refusal(f"{path}.group_size", size, "a multiple of 8 with strategy 'group'")
        return size
    if size not in (None, -1):
        raise refusal(f"{path}.group_size", size, f"null with strategy {strategy!r}")
    return None
