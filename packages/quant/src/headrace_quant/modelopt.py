"""``modelopt``: FP8, NVFP4 and MXFP8 as NVIDIA's Model Optimizer exports them.

``quant_algo`` says what a linear layer with K inputs and N outputs has:

=============================  =====================================================================
``FP8``                        ``weight`` float8_e4m3fn [N, K], ``weight_scale`` of one number
``FP8_PER_CHANNEL_PER_TOKEN``  the same, ``weight_scale`` [N]
``FP8_PB_WO``                  the same, ``weight_scale`` of blocks of 128 by 128, maybe with axes of 1
``NVFP4``                      ``weight`` uint8 [N, K / 2], ``weight_scale`` float8_e4m3fn [N, K / 16],
                               ``weight_scale_2`` of one number, which multiplies
``MXFP8``                      ``weight`` float8_e4m3fn, ``weight_scale`` uint8 [N, K / 32] (E8M0)
``MIXED_PRECISION``            one of these for each module of ``quantized_layers``
=============================  =====================================================================

``modelopt_fp4`` and ``modelopt_mxfp8`` are names for exports in NVFP4 alone and in MXFP8 alone. The algorithm
stands in ``quantization_config``, or in ``hf_quant_config.json`` below ``quantization``. Activations of
``FP8_PER_CHANNEL_PER_TOKEN`` are ``fp8`` (:data:`headrace_core.ops.QUANT_ACTIVATIONS`), all others floats,
whatever the export says of them, and their scales are passed over; those of the cache are used where it is
in FP8.

Source: github.com/NVIDIA/TensorRT-Model-Optimizer (``modelopt.torch.export``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed
from headrace_core.ops import OpTable
from headrace_quant.config_checks import listed_names, refusal, warn_of_unknown
from headrace_quant.fp8.layers import Fp8Layers
from headrace_quant.fp8.tensors import Fp8Layout, decode_fp8
from headrace_quant.ignored_layers import PartCounts, module_names
from headrace_quant.none import PlainWeight
from headrace_quant.parted import method_by_name
from headrace_quant.small_floats import FloatLayout, SmallFloatWeight

if TYPE_CHECKING:
    from torch import Tensor

_ANY_COLUMNS = 1 << 62
Storage = Fp8Layout | FloatLayout
ALGORITHMS: Mapping[str, Storage] = {
    "FP8": Fp8Layout(None, has_activation_scales=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Layout(
        (1, _ANY_COLUMNS), has_activation_scales=True, activations="fp8"
    ),
    "FP8_PB_WO": Fp8Layout((128, 128), has_activation_scales=True),
    "NVFP4": FloatLayout(
        "e2m1", "weight", scale_kind="e4m3", group_size=16, outer="weight_scale_2"
    ),
    "MXFP8": FloatLayout("e4m3", "weight"),
}
"""``quant_algo`` -> storage."""
MIXED = "MIXED_PRECISION"
_OF_ACTIVATIONS = ("input_scale", "input_global_scale")
_CACHES = ("FP8",)
_STATIC = "static"
"""``kv_cache_scheme`` of exporters other than Model Optimizer: scales stand in the file."""
_KNOWN = (
    "quant_method", "producer", "quantization", "config_groups", "kv_cache_scheme", "kv_cache_quant_algo",
    "quant_algo", "group_size", "exclude_modules", "ignore", "quantized_layers", "has_zero_point",
    "pre_quant_scale",
)  # fmt: skip
"""Keys that Model Optimizer writes, at the top or below ``quantization``."""


class ModelOpt(QuantMethod):
    """Floats of 4 and 8 bits as Model Optimizer exports them.

    Args:
        storage: of modules that ``by_module`` does not name; None: they are in floats.
        by_module: storage by a module's name.
        exclude: names of modules in floats, or their beginnings, with ``*`` for anything.
    """

    name: ClassVar[str] = "modelopt"
    algorithms: ClassVar[Collection[str]] = (*ALGORITHMS, MIXED)
    """``quant_algo`` that this name reads."""

    def __init__(
        self,
        ops: OpTable,
        storage: Storage | None,
        *,
        by_module: Mapping[str, Storage] | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        self.ops, self.storage = ops, storage
        self.by_module = dict(by_module or {})
        self.exclude = [name_pattern(entry) for entry in exclude]
        self.layers = Fp8Layers(ops)
        self.parts = PartCounts()

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> ModelOpt:
        if config is None:
            raise ConfigError(
                f"quantization {cls.name!r} needs a checkpoint made with it; 'fp8' and 'mxfp4' quantize "
                "while loading",
                field="model.quantization",
            )
        inner = config.get("quantization")
        found = inner if isinstance(inner, Mapping) else config
        warn_of_unknown(cls.name, {**config, **found}, _KNOWN)
        of_cache = found.get("kv_cache_quant_algo")
        if of_cache and str(of_cache).upper() not in _CACHES:
            raise refusal(
                "kv_cache_quant_algo", of_cache, f"null or {' or '.join(map(repr, _CACHES))}"
            )
        cache = config.get("kv_cache_scheme")
        is_float = isinstance(cache, Mapping) and cache.get("type") == "float"
        if cache and cache != _STATIC and not is_float:
            raise refusal("kv_cache_scheme", cache, f"null, {_STATIC!r}, or floats of 8 bits")
        algorithm, size = found.get("quant_algo"), found.get("group_size")
        if isinstance(algorithm, str):
            algorithm = algorithm.upper()
        if algorithm not in cls.algorithms:
            accepted = " or ".join(map(repr, cls.algorithms))
            own = (
                "" if cls is ModelOpt else f" with {cls.name!r}; {ModelOpt.name!r} reads the others"
            )
            raise refusal("quant_algo", algorithm, f"{accepted}{own}")
        exclude = [
            entry
            for key in ("exclude_modules", "ignore")
            for entry in listed_names(key, found.get(key) or [])
        ]
        if algorithm == MIXED:
            layers = found.get("quantized_layers")
            if not isinstance(layers, Mapping) or not layers:
                raise refusal("quantized_layers", layers, "an object of modules")
            by_module = {
                name: _storage(f"quantized_layers[{name!r}].", fields)
                for name, fields in layers.items()
            }
            return cls(ops, None, by_module=by_module, exclude=exclude)
        storage = _storage("", {"quant_algo": algorithm, "group_size": size})
        return cls(ops, storage, exclude=exclude)

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        names = module_names(spec)
        self.parts.note(spec)

        def make(storage: Storage | None) -> LinearMethod:
            if storage is None:
                return PlainWeight(self.ops)
            if isinstance(storage, FloatLayout):
                return SmallFloatWeight(self.ops, storage)
            ours = [name for name in names if self._storage_of(name) == storage]
            return self.layers.method(spec, ours if len(ours) < len(names) else None, storage)

        return method_by_name(spec, self._storage_of, make)

    def _storage_of(self, name: str) -> Storage | None:
        if any(entry.fullmatch(name) for entry in self.exclude):
            return None
        return self.by_module.get(name, self.storage)

    def _fp8_of(self, name: str) -> Fp8Layout | None:
        storage = self._storage_of(name)
        return storage if isinstance(storage, Fp8Layout) else None

    def decode(
        self,
        tensors: Iterable[tuple[str, Tensor, Path]],
        dtype: str,
        passes_over: Callable[[str], bool],
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """The checkpoint's tensors with scales in the layers' shapes; see :class:`Fp8Layers` of FP8.

        Raises: WeightsError naming file and tensor: a scale is missing, or does not fit.
        """
        return decode_fp8(
            self._with_shapes(tensors),
            getattr(torch, dtype),
            self._fp8_of,
            passes_over=passes_over,
            keep=self.layers.kept,
        )

    def _with_shapes(
        self, tensors: Iterable[tuple[str, Tensor, Path]]
    ) -> Iterator[tuple[str, Tensor, Path]]:
        for name, tensor, file in tensors:
            module, _, last = name.rpartition(".")
            storage = self._storage_of(module)
            if storage is not None and last in _OF_ACTIVATIONS:
                continue
            if storage is not None and last == "pre_quant_scale":
                raise WeightsError(
                    f"{file}: tensor {name!r}: scales of activations that are divided out of weights (AWQ) "
                    "are not applied"
                )
            if isinstance(storage, Fp8Layout) and last == "weight_scale":
                tensor = _scale_of_fp8(tensor, storage)
            elif isinstance(storage, FloatLayout) and last == storage.outer:
                tensor = self.parts.spread(module, tensor)
            yield name, tensor, file


class ModelOptFp4(ModelOpt):
    """Exports in NVFP4 alone."""

    name: ClassVar[str] = "modelopt_fp4"
    algorithms: ClassVar[Collection[str]] = ("NVFP4",)


class ModelOptMxfp8(ModelOpt):
    """Exports in MXFP8 alone."""

    name: ClassVar[str] = "modelopt_mxfp8"
    algorithms: ClassVar[Collection[str]] = ("MXFP8",)


def _scale_of_fp8(scale: Tensor, layout: Fp8Layout) -> Tensor:
    """Outputs [N] as [N, 1]; blocks without axes of 1 that stand between them."""
    if layout.block is None:
        return scale
    if layout.block[1] == _ANY_COLUMNS:
        return scale.reshape(-1, 1) if scale.dim() == 1 else scale
    return (
        scale[:, 0, :, 0] if scale.dim() == 4 and scale.shape[1] == scale.shape[3] == 1 else scale
    )


def _storage(path: str, fields: object) -> Storage:
    """Raises: ConfigError: an algorithm, or a size of groups, that is not served."""
    if not isinstance(fields, Mapping):
        raise refusal(path.rstrip("."), fields, "an object with quant_algo")
    algorithm, size = fields.get("quant_algo"), fields.get("group_size")
    if not isinstance(algorithm, str) or algorithm.upper() not in ALGORITHMS:
        raise refusal(f"{path}quant_algo", algorithm, " or ".join(map(repr, (*ALGORITHMS, MIXED))))
    storage = ALGORITHMS[algorithm.upper()]
    wanted = storage.group_size if isinstance(storage, FloatLayout) else 128
    if size not in (None, wanted):
        raise refusal(f"{path}group_size", size, f"null or {wanted} with {algorithm!r}")
    return storage


def name_pattern(entry: str) -> re.Pattern[str]:
    """A name or the beginning of one up to a dot, with ``*`` for anything."""
    return re.compile(".*".join(map(re.escape, entry.split("*"))) + r"(\..*)?")
