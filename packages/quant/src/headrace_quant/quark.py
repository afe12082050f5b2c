"""``quark``: integers and floats of 4, 6 and 8 bits as AMD's Quark exports them.

A linear layer with K inputs and N outputs has ``weight`` and ``weight_scale``, by the ``dtype`` and
``qscheme`` of its ``weight``:

==============================  ====================================================================
``fp8_e4m3``                    float8_e4m3fn [N, K]; one scale, or [N] (``per_channel``)
``int8``                        int8 [N, K]; one scale, or [N]
``int4``, ``uint4`` per group   int32 [K, N / 8], eight neighbouring outputs a word, in AWQ's order
                                (``pack_method: reorder``) or in their own; scales [K / G, N],
                                ``weight_zero_point`` int32 [K / G, N / 8]
``fp4`` per group of 32         uint8 [N, K / 2], the lower half first; scales uint8 [N, K / 32] (E8M0)
``fp6_e2m3``, ``fp6_e3m2``      uint8 [N, K * 3 / 4], four codes in three bytes, lowest bits first
==============================  ====================================================================

Activations are floats, but of ``int8`` weights with dynamic scales of tokens. Scales of activations are
passed over; those of the cache (``k_proj.output_scale``) are used where it is in FP8.

Source: AMD Quark 0.10 (``quark.torch.utils.pack``, its export of safetensors).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed
from headrace_core.ops import OpTable
from headrace_quant.awq import ORDER, AWQWeight
from headrace_quant.config_checks import listed_names, refusal, warn_of_unknown
from headrace_quant.fp8.layers import Fp8Layers
from headrace_quant.fp8.tensors import Fp8Layout, decode_fp8
from headrace_quant.ignored_layers import PartCounts, matches, module_names
from headrace_quant.none import PlainWeight
from headrace_quant.parted import method_by_name
from headrace_quant.small_floats import FloatLayout, SmallFloatWeight
from headrace_quant.stored_integers import ByteFormat, StoredInt8

if TYPE_CHECKING:
    from torch import Tensor

_ANY_COLUMNS = 1 << 62
_SMALL_FLOATS = {"fp4": "e2m1", "fp6_e2m3": "e2m3", "fp6_e3m2": "e3m2"}
DTYPES = ("fp8_e4m3", "int8", "int4", "uint4", *_SMALL_FLOATS)
"""``dtype`` of weights that are served."""
_FLOAT_DTYPES = ("fp8_e4m3", *_SMALL_FLOATS)
_KNOWN = (
    "quant_method", "quant_mode", "version", "global_quant_config", "layer_quant_config",
    "layer_type_quant_config", "kv_cache_quant_config", "kv_cache_post_rope", "softmax_quant_spec", "exclude",
    "export", "algo_config", "log_severity_level",
)  # fmt: skip
"""Keys that Quark writes."""
_PASSED_OVER = ("input_scale", "input_zero_point", "output_zero_point")
_OF_CACHE = ("k_proj", "v_proj")
"""Last parts of names of modules whose ``output_scale`` is the cache's."""
_AWQ_NAMES = {"weight": "qweight", "weight_scale": "scales", "weight_zero_point": "qzeros"}
_SIGNS = 0x88888888 - (1 << 32)
"""The topmost bit of each of eight codes, as int32."""


@dataclass(frozen=True, slots=True)
class Words:
    """Integers of 4 bits, eight outputs a word."""

    group_size: int
    is_signed: bool
    """Codes are in two's complement."""
    symmetric: bool
    reordered: bool


@dataclass(frozen=True, slots=True)
class Scheme:
    """Storage and multiplication of a layer."""

    storage: Fp8Layout | ByteFormat | FloatLayout | Words
    activations: str = "float"


class Quark(QuantMethod):
    """Integers and small floats as Quark exports them.

    Args:
        scheme: of layers that no entry of ``by_name`` means; None: floats.
        by_name: patterns of names and their schemes; the first that matches decides.
        exclude: names, their beginnings up to a dot, or patterns with ``*`` or after ``re:``, of
            modules in floats.
    """

    name: ClassVar[str] = "quark"

    def __init__(
        self,
        ops: OpTable,
        scheme: Scheme | None,
        by_name: Sequence[tuple[str, Scheme | None]] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        self.ops, self.scheme = ops, scheme
        self.by_name, self.exclude = tuple(by_name), tuple(exclude)
        self.layers, self.parts = Fp8Layers(ops), PartCounts()
        self.in_words: set[str] = set()
        """Modules whose layers hold words of integers; the scheme of all others, a norm's or the embedding's,
        means nothing."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> Quark:
        if config is None:
            raise ConfigError(
                "quantization 'quark' needs a checkpoint made with it; 'int8', 'fp8' and 'mxfp4' quantize "
                "while loading",
                field="model.quantization",
            )
        warn_of_unknown(cls.name, config, _KNOWN)
        export = config.get("export") or {}
        if not isinstance(export, Mapping):
            raise refusal("export", export, "an object")
        form = export.get("weight_format") or "real_quantized"
        if form != "real_quantized":
            raise refusal("export.weight_format", form, "'real_quantized'")
        order = export.get("pack_method") or "reorder"
        if order not in ("reorder", "order"):
            raise refusal("export.pack_method", order, "'reorder' or 'order'")
        for key in ("layer_type_quant_config", "softmax_quant_spec"):
            if config.get(key):
                raise refusal(key, config[key], "empty")
        if "rotation" in repr(config.get("algo_config")):
            raise refusal("algo_config", config["algo_config"], "without rotations")
        by_layer = config.get("layer_quant_config") or {}
        if not isinstance(by_layer, Mapping):
            raise refusal("layer_quant_config", by_layer, "an object of patterns")
        reordered = order == "reorder"
        whole = config.get("global_quant_config")
        return cls(
            ops,
            _scheme("global_quant_config", whole, reordered=reordered),
            [
                (pattern, _scheme(f"layer_quant_config[{pattern!r}]", fields, reordered=reordered))
                for pattern, fields in by_layer.items()
            ],
            listed_names("exclude", config.get("exclude") or []),
        )

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        names = module_names(spec)
        self.parts.note(spec)
        self.in_words.update(name for name in names if self._is_in_words(name))

        def make(scheme: Scheme | None) -> LinearMethod:
            if scheme is None:
                return PlainWeight(self.ops)
            match scheme.storage:
                case ByteFormat():
                    return StoredInt8(self.ops, scheme.storage, activations=scheme.activations)
                case FloatLayout():
                    return SmallFloatWeight(self.ops, scheme.storage)
                case Words():
                    return AWQWeight(self.ops, scheme.storage.group_size, stored_as="weight")
            ours = [name for name in names if self._scheme_of(name) == scheme]
            parts = ours if len(ours) < len(names) else None
            return self.layers.method(spec, parts, scheme.storage)

        return method_by_name(spec, self._scheme_of, make)

    def _scheme_of(self, name: str) -> Scheme | None:
        for entry in self.exclude:
            if matches(entry, name) or (not entry.startswith("re:") and fnmatchcase(name, entry)):
                return None
        for pattern, scheme in self.by_name:
            if fnmatchcase(name, pattern):
                return scheme
        return self.scheme

    def _is_in_words(self, name: str) -> bool:
        scheme = self._scheme_of(name)
        return scheme is not None and isinstance(scheme.storage, Words)

    def _fp8_of(self, name: str) -> Fp8Layout | None:
        scheme = self._scheme_of(name)
        return scheme.storage if scheme and isinstance(scheme.storage, Fp8Layout) else None

    def decode(
        self,
        tensors: Iterable[tuple[str, Tensor, Path]],
        dtype: str,
        passes_over: Callable[[str], bool],
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """The checkpoint's tensors as the layers have them; see :class:`Fp8Layers` of FP8.

        Raises: WeightsError naming file and tensor: a scale is missing, or does not fit.
        """
        return decode_fp8(
            self._settled(tensors),
            getattr(torch, dtype),
            self._fp8_of,
            passes_over=passes_over,
            keep=self.layers.kept,
        )

    def _settled(
        self, tensors: Iterable[tuple[str, Tensor, Path]]
    ) -> Iterator[tuple[str, Tensor, Path]]:
        for name, tensor, file in tensors:
            module, _, last = name.rpartition(".")
            is_output = last == "output_scale" and module.rpartition(".")[2] not in _OF_CACHE
            if last in _PASSED_OVER or is_output:
                continue
            scheme = self._scheme_of(module)
            if scheme is None or last not in _AWQ_NAMES:
                yield name, tensor, file
                continue
            storage = scheme.storage
            if isinstance(storage, Words) and module not in self.in_words:
                yield name, tensor, file
                continue
            if last == "weight_zero_point" and not (
                isinstance(storage, Words) and not storage.symmetric
            ):
                if bool(tensor.any()):
                    raise WeightsError(
                        f"{file}: tensor {name!r}: symmetric weights have no zero points but 0"
                    )
            elif isinstance(storage, Words):
                if tensor.dim() != 2 or (last != "weight_scale" and tensor.dtype != torch.int32):
                    raise WeightsError(
                        f"{file}: tensor {name!r} is {str(tensor.dtype).removeprefix('torch.')} "
                        f"{list(tensor.shape)}: must be a matrix, and int32 but for scales"
                    )
                for suffix, found in _as_awq(last, tensor, storage).items():
                    yield f"{module}.{suffix}", found, file
            elif isinstance(storage, ByteFormat) and storage.of_module and last == "weight_scale":
                yield name, self.parts.spread(module, tensor), file
            else:
                yield name, _shaped(last, tensor, storage), file


def _shaped(last: str, tensor: Tensor, storage: Fp8Layout | ByteFormat | FloatLayout) -> Tensor:
    """Scales of outputs [N] as [N, 1]."""
    if last != "weight_scale" or isinstance(storage, FloatLayout):
        return tensor
    return tensor[:, None] if tensor.dim() == 1 else tensor


def _as_awq(last: str, tensor: Tensor, form: Words) -> dict[str, Tensor]:
    """A tensor by the name that AWQ has for it, words in its order and without signs."""
    if last == "weight_scale":
        found = {"scales": tensor}
        if form.symmetric:
            shape = (tensor.shape[0], tensor.shape[-1] // len(ORDER))
            found["qzeros"] = torch.full(shape, _SIGNS, dtype=torch.int32)
        return found
    words = tensor ^ _SIGNS if form.is_signed else tensor
    if not form.reordered:
        codes = [(words >> 4 * place & 15) << 4 * nibble for nibble, place in enumerate(ORDER)]
        words = torch.stack(codes).sum(0, dtype=torch.int64)
        words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return {_AWQ_NAMES[last]: words}


def _scheme(path: str, fields: object, *, reordered: bool) -> Scheme | None:
    """Raises: ConfigError: what is not served, by key and value."""
    if fields is None:
        return None
    if not isinstance(fields, Mapping):
        raise refusal(path, fields, "an object")
    if fields.get("bias"):
        raise refusal(f"{path}.bias", fields["bias"], "null")
    outputs = fields.get("output_tensors")
    if outputs and not (isinstance(outputs, Mapping) and outputs.get("dtype") == "fp8_e4m3"):
        raise refusal(f"{path}.output_tensors", outputs, "null, or 'fp8_e4m3' for the cache")
    weight = fields.get("weight")
    if weight is None:
        return None
    if not isinstance(weight, Mapping):
        raise refusal(f"{path}.weight", weight, "an object")
    dtype = weight.get("dtype")
    if dtype not in DTYPES:
        raise refusal(f"{path}.weight.dtype", dtype, " or ".join(map(repr, DTYPES)))
    storage = _storage(f"{path}.weight", weight, reordered=reordered)
    activations = _activations(f"{path}.input_tensors", fields.get("input_tensors"), str(dtype))
    return Scheme(storage, activations)


def _storage(
    path: str, weight: Mapping[str, Any], *, reordered: bool
) -> Fp8Layout | ByteFormat | FloatLayout | Words:
    dtype, scheme, size = (weight.get(key) for key in ("dtype", "qscheme", "group_size"))
    if weight.get("is_dynamic"):
        raise refusal(f"{path}.is_dynamic", weight["is_dynamic"], "false")
    if dtype in ("fp8_e4m3", "int8"):
        if scheme not in ("per_tensor", "per_channel"):
            raise refusal(f"{path}.qscheme", scheme, f"'per_tensor' or 'per_channel' of {dtype!r}")
        if scheme == "per_channel" and weight.get("ch_axis") not in (None, 0):
            raise refusal(f"{path}.ch_axis", weight["ch_axis"], "0")
        of_module = scheme == "per_tensor"
        if dtype == "fp8_e4m3":
            return Fp8Layout(None if of_module else (1, _ANY_COLUMNS))
        if weight.get("symmetric") is False:
            raise refusal(f"{path}.symmetric", False, "true of 'int8'")
        return ByteFormat(8, None, of_module)
    if scheme != "per_group":
        raise refusal(f"{path}.qscheme", scheme, f"'per_group' of {dtype!r}")
    if dtype in _SMALL_FLOATS:
        if size not in (None, 32):
            raise refusal(f"{path}.group_size", size, f"32 of {dtype!r}")
        if weight.get("scale_format") not in (None, "e8m0"):
            raise refusal(f"{path}.scale_format", weight["scale_format"], "'e8m0'")
        return FloatLayout(_SMALL_FLOATS[str(dtype)], "weight")
    if type(size) is not int or size < 8:
        raise refusal(f"{path}.group_size", size, "at least 8")
    symmetric = bool(weight.get("symmetric", dtype == "int4"))
    if symmetric and dtype == "uint4":
        raise refusal(f"{path}.symmetric", symmetric, "false of 'uint4'")
    return Words(size, dtype == "int4", symmetric, reordered)


def _activations(path: str, inputs: object, dtype: str) -> str:
    """Form in which activations enter."""
    if not inputs:
        return "float"
    if not isinstance(inputs, Mapping):
        raise refusal(path, inputs, "an object, or null")
    found = inputs.get("dtype")
    if dtype in _FLOAT_DTYPES:
        if found not in _FLOAT_DTYPES:
            raise refusal(f"{path}.dtype", found, " or ".join(map(repr, _FLOAT_DTYPES)))
        return "float"
    if dtype != "int8" or found != "int8":
        raise refusal(
            f"{path}.dtype", found, "'int8' with weights of 'int8', or input_tensors null"
        )
    if not inputs.get("is_dynamic"):
        raise refusal(f"{path}.is_dynamic", inputs.get("is_dynamic"), "true of 'int8'")
    if inputs.get("qscheme") not in ("per_token", "per_channel"):
        raise refusal(f"{path}.qscheme", inputs.get("qscheme"), "'per_token' of 'int8'")
    return "int8"
