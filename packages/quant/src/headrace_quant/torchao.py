"""``torchao``: integers and FP8 as TorchAO writes them.

``quant_type.default`` is the configuration with which the model was quantized, by its class:

=============================================  =======================================================
``Int8WeightOnlyConfig``                       qdata int8 [N, K], scale [N, 1]
``Int8DynamicActivationInt8WeightConfig``      the same; activations in int8, a scale per token
``IntxWeightOnlyConfig``                       qdata int8 [N, K] of 2 to 8 bits, scale and zero_point
                                               [N, K / G]
``Int4WeightOnlyConfig`` (packing ``plain``)   qdata uint8 [N, K / 2], the lower half first, in two's
                                               complement; scale and zero_point [K / G, N], floats: a
                                               weight is ``q * scale + zero_point``
``Float8WeightOnlyConfig``,                    qdata float8_e4m3fn [N, K], scale [N, 1] or one;
``Float8DynamicActivationFloat8WeightConfig``  activations stay floats
``ModuleFqnToConfig``, ``FqnToConfig``         one of these by a module's name, ``_default`` for others
=============================================  =======================================================

A module's tensors are named ``_weight_qdata``, ``_weight_scale`` and ``_weight_zero_point``, as in
safetensors files; so are those of pickled files by the time that they come here.

Source: github.com/pytorch/ao (0.18: ``prototype/safetensors``, ``quantization/quantize_/workflows``).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed, TensorSpec
from headrace_core.ops import OpTable, PackedLinear, QuantizedWeight
from headrace_quant.bits import held_bits
from headrace_quant.code_books import nibble_codes
from headrace_quant.config_checks import listed_names, refusal, uneven_inputs
from headrace_quant.fp8.layers import Fp8Layers
from headrace_quant.fp8.tensors import Fp8Layout, decode_fp8
from headrace_quant.ignored_layers import module_names
from headrace_quant.int_linear_methods import IntegerMethod, checked_scales, scale_spec
from headrace_quant.none import PlainWeight
from headrace_quant.parted import method_by_name
from headrace_quant.stored_integers import ByteFormat, StoredInt8

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

HEAD = "lm_head"
_LAST_VERSION = 2
"""Of TorchAO's configurations."""
_ANY_COLUMNS = 1 << 62
CODES, SCALES, ZEROS = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_OF_FP8 = {CODES: "weight", SCALES: "weight_scale"}
_MAPS = {"ModuleFqnToConfig": "module_fqn_to_config", "FqnToConfig": "fqn_to_config"}
_FREE = ("quant_method", "quant_type", "modules_to_not_convert", "untie_embedding_weights")


@dataclass(frozen=True, slots=True)
class Nibbles:
    """Integers of 4 bits with a scale and a minimum for each group of inputs."""

    group_size: int


@dataclass(frozen=True, slots=True)
class Scheme:
    """Storage and multiplication of a layer."""

    storage: ByteFormat | Nibbles | Fp8Layout
    activations: str = "float"


class NibbleWeight(IntegerMethod):
    """``_weight_qdata`` uint8 [N, K / 2], ``_weight_scale`` and ``_weight_zero_point`` float [N, K / G]."""

    def __init__(self, ops: OpTable, size: int) -> None:
        super().__init__(ops, activations="float")
        self.group_size = size

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        rows, inputs, size = spec.out_features, spec.in_features, self.group_size
        if inputs % size:
            raise uneven_inputs(spec, CODES, size, "group_size")
        return {
            CODES: TensorSpec((rows, inputs // 2), "uint8", in_dim=1),
            SCALES: scale_spec((rows, inputs // size), 1),
            ZEROS: scale_spec((rows, inputs // size), 1),
        }

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        weight = QuantizedWeight(
            nibble_codes(tensors[CODES] ^ 0x88),
            checked_scales(spec, tensors[SCALES]),
            bits=4,
            group_size=self.group_size,
            minimums=-tensors[ZEROS].contiguous(),
        )
        return self.pack(spec, weight)


class TorchAO(QuantMethod):
    """Integers and FP8 as TorchAO writes them.

    Args:
        scheme: of modules that no entry of ``by_name`` means; None: floats.
        by_name: names, or patterns after ``re:``, and their schemes.
        ignore: names, or pieces of names between dots, of modules in floats.
    """

    name: ClassVar[str] = "torchao"

    def __init__(
        self,
        ops: OpTable,
        scheme: Scheme | None,
        by_name: Mapping[str, Scheme | None] | None = None,
        ignore: Sequence[str] = (HEAD,),
    ) -> None:
        self.ops, self.scheme = ops, scheme
        self.by_name, self.ignore = dict(by_name or {}), tuple(ignore)
        self.layers = Fp8Layers(ops)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> TorchAO:
        if config is None:
            raise ConfigError(
                "quantization 'torchao' needs a checkpoint made with it; 'int8', 'int4' and 'fp8' quantize "
                "while loading",
                field="model.quantization",
            )
        for key, value in config.items():
            if key not in _FREE and value:
                raise refusal(key, value, "absent or false")
        kind = config.get("quant_type")
        found = kind.get("default") if isinstance(kind, Mapping) else None
        if not isinstance(kind, Mapping) or len(kind) != 1 or not isinstance(found, Mapping):
            raise refusal(
                "quant_type",
                kind,
                "an object with a configuration below 'default': save again with 0.15 on",
            )
        ignore = config.get("modules_to_not_convert")
        names = [HEAD] if ignore is None else listed_names("modules_to_not_convert", ignore)
        path, of_names = "quant_type.default", _MAPS.get(str(found.get("_type")))
        if of_names is not None:
            path, entries = f"{path}.{of_names}", _data(found).get(of_names)
            if not isinstance(entries, Mapping):
                raise refusal(path, entries, "an object of modules")
            by_name = {
                str(name).removesuffix(".weight"): _scheme(f"{path}[{name!r}]", each)
                for name, each in entries.items()
            }
            return cls(ops, by_name.pop("_default", None), by_name, names)
        return cls(ops, _scheme(path, found), ignore=names)

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        names = module_names(spec)

        def make(scheme: Scheme | None) -> LinearMethod:
            if scheme is None:
                return PlainWeight(self.ops)
            match scheme.storage:
                case ByteFormat():
                    return StoredInt8(self.ops, scheme.storage, activations=scheme.activations)
                case Nibbles():
                    return NibbleWeight(self.ops, scheme.storage.group_size)
            ours = [name for name in names if self._scheme_of(name) == scheme]
            parts = ours if len(ours) < len(names) else None
            return self.layers.method(spec, parts, scheme.storage)

        return method_by_name(spec, self._scheme_of, make)

    def _scheme_of(self, name: str) -> Scheme | None:
        if name in self.by_name:
            return self.by_name[name]
        if any(f".{entry}." in f".{name}." for entry in self.ignore):
            return None
        for entry, scheme in self.by_name.items():
            if entry.startswith("re:") and re.fullmatch(entry[3:], name):
                return scheme
        return self.scheme

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
            self._renamed(tensors),
            getattr(torch, dtype),
            self._fp8_of,
            passes_over=passes_over,
            keep=self.layers.kept,
        )

    def _renamed(
        self, tensors: Iterable[tuple[str, Tensor, Path]]
    ) -> Iterator[tuple[str, Tensor, Path]]:
        for name, tensor, file in tensors:
            module, _, last = name.rpartition(".")
            scheme = self._scheme_of(module)
            storage = None if scheme is None else scheme.storage
            if isinstance(storage, ByteFormat) and last == ZEROS and not storage.has_zeros:
                if bool(tensor.any()):
                    raise WeightsError(
                        f"{file}: tensor {name!r}: symmetric weights have no zero points but 0"
                    )
                continue
            if isinstance(storage, Nibbles) and last in (CODES, SCALES, ZEROS):
                is_code = last == CODES and tensor.dtype == torch.int8
                tensor = tensor.view(torch.uint8) if is_code else tensor
                tensor = tensor if last == CODES else tensor.T
            if isinstance(storage, Fp8Layout) and last in _OF_FP8:
                is_one = last == SCALES and storage.block is None and tensor.numel() == 1
                tensor = tensor.reshape(1) if is_one else tensor
                name = f"{module}.{_OF_FP8[last]}"
            yield name, tensor, file


def _data(found: Mapping[str, Any]) -> Mapping[str, Any]:
    data = found.get("_data")
    return data if isinstance(data, Mapping) else {}


def _plain(value: object) -> object:
    """A value of the configuration, without the class around it (``{"_type": .., "_data": ..}``)."""
    if isinstance(value, Mapping) and "_data" in value:
        return value["_data"]
    return value


def _granularity(path: str, data: Mapping[str, Any]) -> tuple[str, int | None]:
    """Name of the class of the (weight's) granularity, and its group size."""
    value = data.get("granularity")
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        value = value[-1]  # of activations and weights
    if value is None:
        return "PerRow", data.get("group_size")
    if not isinstance(value, Mapping):
        raise refusal(f"{path}.granularity", value, "an object")
    size = _data(value).get("group_size")
    return str(value.get("_type")), size


def _integers(path: str, data: Mapping[str, Any], bits: int, *, has_zeros: bool) -> ByteFormat:
    kind, size = _granularity(path, data)
    if kind not in ("PerRow", "PerAxis", "PerGroup"):
        raise refusal(f"{path}.granularity", kind, "'PerRow', 'PerAxis' or 'PerGroup'")
    if size is not None and (type(size) is not int or size < 8):
        raise refusal(f"{path}.group_size", size, "null, or at least 8")
    return ByteFormat(bits, size, has_zeros=has_zeros, codes=CODES, scales=SCALES, zeros=ZEROS)


def _float8(path: str, data: Mapping[str, Any]) -> Fp8Layout:
    kind, _ = _granularity(path, data)
    if kind not in ("PerRow", "PerTensor"):
        raise refusal(f"{path}.granularity", kind, "'PerRow' or 'PerTensor'")
    dtype = _plain(data.get("weight_dtype"))
    if dtype not in (None, "float8_e4m3fn"):
        raise refusal(f"{path}.weight_dtype", dtype, "'float8_e4m3fn'")
    return Fp8Layout((1, _ANY_COLUMNS) if kind == "PerRow" else None)


def _scheme(path: str, found: object) -> Scheme | None:
    """Raises: ConfigError: what is not served, by key and value."""
    if found is None:
        return None
    kind = found.get("_type") if isinstance(found, Mapping) else found
    if not isinstance(found, Mapping) or not isinstance(kind, str) or kind not in SCHEMES:
        raise refusal(f"{path}._type", kind, " or ".join(map(repr, (*SCHEMES, *_MAPS))))
    version = found.get("_version", _LAST_VERSION)
    if type(version) is not int or version > _LAST_VERSION:
        logger.warning(
            "quantization_config: %s._version = %r: versions up to %d are known, and a newer one may mean "
            "other numbers; check the answers", path, version, _LAST_VERSION,
        )  # fmt: skip
    return SCHEMES[kind](f"{path}._data", _data(found))


def _int8(path: str, data: Mapping[str, Any]) -> Scheme:
    return Scheme(_integers(path, data, 8, has_zeros=False))


def _int8_activations(path: str, data: Mapping[str, Any]) -> Scheme:
    mapping = _plain(data.get("act_mapping_type")) or "SYMMETRIC"
    if mapping != "SYMMETRIC":
        raise refusal(f"{path}.act_mapping_type", mapping, "'SYMMETRIC'")
    return Scheme(_integers(path, data, 8, has_zeros=False), "int8")


def _intx(path: str, data: Mapping[str, Any]) -> Scheme:
    dtype = str(_plain(data.get("weight_dtype")) or "int8")
    if dtype not in (*(f"int{bits}" for bits in range(2, 9)),):
        raise refusal(f"{path}.weight_dtype", dtype, "'int2' to 'int8'")
    packing = str(_plain(data.get("intx_packing_format")) or "unpacked_to_int8")
    if packing.lower() != "unpacked_to_int8":
        raise refusal(f"{path}.intx_packing_format", packing, "'UNPACKED_TO_INT8'")
    bits = held_bits(int(dtype.removeprefix("int")))
    return Scheme(_integers(path, data, bits, has_zeros=True))


def _int4(path: str, data: Mapping[str, Any]) -> Scheme:
    packing = str(_plain(data.get("int4_packing_format")) or "plain")
    if packing.lower() != "plain":
        raise refusal(
            f"{path}.int4_packing_format", packing, "'plain': others are for single kernels"
        )
    size = data.get("group_size", 128)
    if type(size) is not int or size < 8:
        raise refusal(f"{path}.group_size", size, "at least 8")
    return Scheme(Nibbles(size))


def _fp8(path: str, data: Mapping[str, Any]) -> Scheme:
    return Scheme(_float8(path, data))


SCHEMES: Mapping[str, Callable[[str, Mapping[str, Any]], Scheme]] = {
    "Int8WeightOnlyConfig": _int8,
    "Int8DynamicActivationInt8WeightConfig": _int8_activations,
    "IntxWeightOnlyConfig": _intx,
    "Int4WeightOnlyConfig": _int4,
    "Float8WeightOnlyConfig": _fp8,
    "Float8DynamicActivationFloat8WeightConfig": _fp8,
}
"""Class of a configuration -> what reads its fields."""
