"""``bitsandbytes``: NF4 and FP4 in blocks along the flattened weight, and LLM.int8.

A layer with K inputs and N outputs, in 4 bits, has

==================================================  ====================================================
``weight``                                          uint8 [N * K / 2, 1], row after row, the first of two
                                                    codes in the upper half; or another dtype's bytes
``weight.absmax``                                   float32 [blocks], or uint8 with double quantization
``weight.quant_map``                                float32 [16], the code book
``weight.nested_absmax``, ``.nested_quant_map``     float32 [blocks / 256], [256]: of double quantization
``weight.quant_state.bitsandbytes__nf4``, or fp4    uint8, a JSON object: shape, blocksize, nested_offset ...
==================================================  ====================================================

and means ``quant_map[code] * a``, ``a`` being its block's ``absmax``, or ``nested_quant_map[absmax] *
nested_absmax + nested_offset``. In 8 bits it has ``weight`` int8 [N, K] and ``SCB`` float32 [N] and means
``weight * SCB / 127``. The columns that LLM.int8 takes apart, where activations are beyond
``llm_int8_threshold``, are multiplied exactly; here activations are floats, and all columns are.

``bitsandbytes``, ``nf4`` and ``fp4`` also round any checkpoint while it is loaded: blocks of 64 inputs with
a float32 scale, as bitsandbytes does where K is a multiple of 64.

Sources: Dettmers et al. 2022, arXiv:2208.07339; Dettmers et al. 2023, arXiv:2305.14314; the layout:
github.com/bitsandbytes-foundation/bitsandbytes (``QuantState``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed, TensorSpec
from headrace_core.ops import OpTable, PackedLinear, QuantizedWeight
from headrace_quant.code_books import FP4, NF4, nibble_codes
from headrace_quant.config_checks import listed_names, refusal
from headrace_quant.ignored_layers import module_names
from headrace_quant.int_linear_methods import IntegerMethod
from headrace_quant.none import PlainWeight
from headrace_quant.parted import method_by_name
from headrace_quant.rounded_floats import CodeBook, RoundedFloats

if TYPE_CHECKING:
    from torch import Tensor

HEAD = "lm_head"
BLOCK = 64
"""Codes that share a scale, in every published checkpoint and in all that are rounded here."""
_LEAST_GROUP = 16
KINDS: Mapping[str, tuple[float, ...]] = {"nf4": NF4, "fp4": FP4}
_STATE = "quant_state.bitsandbytes__"
_SERVED: Mapping[str, tuple[object, ...]] = {
    "quant_method": ("bitsandbytes",),
    "bnb_4bit_quant_type": tuple(KINDS),
    "llm_int8_has_fp16_weight": (False,),
}
"""Key -> values that are served; null is served everywhere."""
_FREE = (
    "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage", "bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_threshold", "llm_int8_skip_modules",
)  # fmt: skip
"""Other keys: they choose between forms, or change nothing here (see the module's description)."""


_STORAGE = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that ``bnb_4bit_quant_storage`` gives the same bytes."""


def group_size(inputs: int) -> int:
    """Inputs of a rank's row that surely share a scale, however blocks of 64 lie along the flattened weight.

    Returns:
        0: fewer than 16.
    """
    size = math.gcd(inputs, BLOCK)
    return size if size >= _LEAST_GROUP else 0


class BlockwiseWeight(IntegerMethod):
    """A layer in 4 bits, whose tensors :meth:`BitsAndBytes.decode` has brought into rows: ``weight`` uint8
    [N, K / 2], ``weight_scale`` float32 [N, K / g] and ``quant_map`` float32 [16]."""

    def __init__(self, ops: OpTable) -> None:
        super().__init__(ops, activations="float")

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        size, rows, inputs = group_size(spec.in_features), spec.out_features, spec.in_features
        if not size:
            raise ConfigError(
                f"tensor '{module_names(spec)[0]}.weight': a rank's in_features = {inputs}: blocks of "
                f"{BLOCK} weights, which bitsandbytes counts along the rows, are served for multiples of "
                f"{_LEAST_GROUP}; fewer ranks (tensor_parallel_size) may help"
            )
        return {
            "weight": TensorSpec((rows, inputs // 2), "uint8", in_dim=1),
            "weight_scale": TensorSpec((rows, inputs // size), "float32", in_dim=1),
            "quant_map": TensorSpec((1 << 4,), "float32", part_dim=None),
        }

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        weight = QuantizedWeight(
            nibble_codes(tensors["weight"], high_first=True),
            tensors["weight_scale"].contiguous(),
            bits=4,
            group_size=group_size(spec.in_features),
            table=tensors["quant_map"].contiguous(),
        )
        return self.pack(spec, weight)


class Int8Weight(IntegerMethod):
    """``weight`` int8 [N, K] and ``SCB`` float32 [N], the largest magnitude of each row."""

    def __init__(self, ops: OpTable) -> None:
        super().__init__(ops, activations="float")

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        return {
            "weight": TensorSpec((spec.out_features, spec.in_features), "int8", in_dim=1),
            "SCB": TensorSpec((spec.out_features,), "float32", any_float=True),
        }

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        largest = tensors["SCB"]
        if not bool((largest.isfinite() & (largest >= 0)).all()):
            raise WeightsError(f"layer {spec.name!r}: SCB holds values that are no magnitudes")
        return self.pack(spec, QuantizedWeight(tensors["weight"], largest[:, None] / 127))


@dataclass(slots=True)
class _Module:
    """Tensors of one module in 4 bits, until all have come."""

    file: Path
    tensors: dict[str, Tensor] = field(default_factory=dict)
    state: Mapping[str, Any] | None = None

    def is_complete(self) -> bool:
        return self.state is not None and not self.missing()

    def missing(self) -> list[str]:
        wanted = ["weight", "weight.absmax", "weight.quant_map"]
        if self.state is None:
            return [f"weight.{_STATE}nf4"]
        if "nested_offset" in self.state:
            wanted += ["weight.nested_absmax", "weight.nested_quant_map"]
        return [name for name in wanted if name not in self.tensors]


_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


class BitsAndBytes(QuantMethod):
    """NF4, FP4 and LLM.int8 as bitsandbytes writes them; or NF4 and FP4 while loading.

    Args:
        kind: of :data:`KINDS`, or ``int8``.
        stored: the checkpoint holds codes; else its weights are floats.
        ignore: names, or pieces of names between dots, of modules that are left in floats.
    """

    name: ClassVar[str] = "bitsandbytes"
    online_kind: ClassVar[str] = "nf4"

    def __init__(
        self, ops: OpTable, kind: str, *, stored: bool, ignore: Sequence[str] = (HEAD,)
    ) -> None:
        self.ops, self.kind, self.stored, self.ignore = ops, kind, stored, tuple(ignore)
        self._groups: dict[str, int] = {}
        """Group size by the name of a module that a layer waits for."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> BitsAndBytes:
        if config is None:
            return cls(ops, cls.online_kind, stored=False)
        for key, value in config.items():
            if key not in (*_SERVED, *_FREE) and value is not None:
                raise refusal(key, value, "absent: bitsandbytes has no such key")
        for key, served in _SERVED.items():
            value = config.get(key)
            if not any(value == one and type(value) is type(one) for one in (None, *served)):
                raise refusal(key, value, " or ".join(map(repr, served)))
        four, eight = (
            config.get(f"load_in_{bits}bit", config.get(f"_load_in_{bits}bit", False))
            for bits in (4, 8)
        )
        if bool(four) is bool(eight):
            raise refusal("load_in_4bit", four, f"true, or load_in_8bit (now {eight!r}), not both")
        ignore = config.get("llm_int8_skip_modules")
        return cls(
            ops,
            (config.get("bnb_4bit_quant_type") or "fp4") if four else "int8",
            stored=True,
            ignore=[HEAD] if ignore is None else listed_names("llm_int8_skip_modules", ignore),
        )

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        for name in module_names(spec):
            self._groups[name] = group_size(spec.in_features)
        return method_by_name(spec, self._is_left, self._method)

    def _method(self, is_left: bool) -> LinearMethod:
        if is_left:
            return PlainWeight(self.ops)
        if not self.stored:
            return RoundedFloats(self.ops, CodeBook(KINDS[self.kind], BLOCK))
        return Int8Weight(self.ops) if self.kind == "int8" else BlockwiseWeight(self.ops)

    def _is_left(self, name: str) -> bool:
        return any(f".{entry}." in f".{name}." for entry in self.ignore)

    def decode(
        self,
        tensors: Iterable[tuple[str, Tensor, Path]],
        dtype: str,
        passes_over: Callable[[str], bool],
    ) -> Iterable[tuple[str, Tensor, Path]]:
        """The checkpoint's tensors, those of modules in 4 bits as :class:`BlockwiseWeight` has them.

        Raises: WeightsError: naming file and tensor: parts are missing, or contradict each other.
        """
        if not self.stored:
            return tensors
        return (
            _without_layouts(tensors) if self.kind == "int8" else self._rows(tensors, passes_over)
        )

    def _rows(
        self, tensors: Iterable[tuple[str, Tensor, Path]], passes_over: Callable[[str], bool]
    ) -> Iterator[tuple[str, Tensor, Path]]:
        waiting: dict[str, _Module] = {}
        for name, tensor, file in tensors:
            module, part = _split(name, tensor, is_left=self._is_left)
            if part is None or passes_over(name):
                yield name, tensor, file
                continue
            own = waiting.setdefault(module, _Module(file))
            if part.startswith(f"weight.{_STATE}"):
                own.state = self._state(name, tensor, file)
            else:
                own.tensors[part] = tensor
            if own.is_complete():
                del waiting[module]
                for suffix, found in self._module_rows(module, own).items():
                    yield f"{module}.{suffix}", found, own.file
        for module, own in waiting.items():
            if own.state is None and [*own.tensors] == ["weight"]:  # floats of one row or column
                yield f"{module}.weight", own.tensors["weight"], own.file
                continue
            raise WeightsError(
                f"{own.file}: {module!r} is in 4 bits, but there is no tensor "
                f"{', '.join(f'{module}.{name}' for name in own.missing())}"
            )

    def _state(self, name: str, tensor: Tensor, file: Path) -> Mapping[str, Any]:
        try:
            state = json.loads(bytes(tensor.flatten().tolist()))
            rows, inputs = map(int, state["shape"])
            size = int(state["blocksize"])
        except (ValueError, KeyError, TypeError) as error:
            raise WeightsError(
                f"{file}: tensor {name!r} is no JSON object with shape and blocksize: {error!r}"
            ) from error
        kind = name.rpartition("__")[2]
        if kind != self.kind:
            raise WeightsError(
                f"{file}: tensor {name!r}: the layer is in {kind}, quantization_config says "
                f"{self.kind!r} (bnb_4bit_quant_type)"
            )
        if size % BLOCK:
            raise WeightsError(
                f"{file}: tensor {name!r}: blocksize = {size}: must be a multiple of {BLOCK}"
            )
        return {**state, "rows": rows, "inputs": inputs, "blocksize": size}

    def _module_rows(self, module: str, own: _Module) -> dict[str, Tensor]:
        """``weight`` [N, K / 2], ``weight_scale`` [N, K / g] and ``quant_map`` of one module."""
        assert own.state is not None
        rows, inputs, size = (own.state[key] for key in ("rows", "inputs", "blocksize"))
        stored = own.tensors["weight"]
        if stored.dtype not in _STORAGE:
            found, *served = (str(d).removeprefix("torch.") for d in (stored.dtype, *_STORAGE))
            raise WeightsError(
                f"{own.file}: tensor '{module}.weight' has dtype {found}; codes of 4 bits have "
                f"{' or '.join(served)}"
            )
        octets = stored.contiguous().view(torch.uint8).flatten()
        for name, tensor in own.tensors.items():
            is_code = name in ("weight", "weight.absmax") or name.startswith(f"weight.{_STATE}")
            if not (is_code or tensor.is_floating_point()):
                raise WeightsError(
                    f"{own.file}: tensor '{module}.{name}' is {tensor.dtype}: must be floats"
                )
        largest, group = _scales(module, own), self._groups.get(module) or group_size(inputs)
        counts = rows * inputs, -(-rows * inputs // size)
        if 2 * octets.numel() != counts[0] or largest.numel() != counts[1] or not group:
            raise WeightsError(
                f"{own.file}: tensor '{module}.weight' has shape {list(stored.shape)}, {octets.numel()} "
                f"bytes, and {largest.numel()} scales (absmax); a weight {[rows, inputs]} in blocks of "
                f"{size} has {counts[0] // 2} and {counts[1]}, and rows of multiples of {_LEAST_GROUP}"
            )
        starts = torch.arange(0, rows * inputs, group) // size
        return {
            "weight": octets.view(rows, inputs // 2),
            "weight_scale": largest[starts].view(rows, inputs // group),
            "quant_map": own.tensors["weight.quant_map"].float(),
        }


class NF4Online(BitsAndBytes):
    """NF4 of any checkpoint."""

    name: ClassVar[str] = "nf4"

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> BitsAndBytes:
        if config is not None:
            raise refusal(
                "quant_method",
                config.get("quant_method"),
                f"absent: {cls.name!r} rounds checkpoints of floats; leave the setting out: "
                "'bitsandbytes' reads stored codes",
            )
        return super().from_config(None, ops)


class FP4Online(NF4Online):
    """bitsandbytes' FP4 of any checkpoint."""

    name: ClassVar[str] = "fp4"
    online_kind: ClassVar[str] = "fp4"


def _split(name: str, tensor: Tensor, *, is_left: Callable[[str], bool]) -> tuple[str, str | None]:
    """Module and part of the name of a tensor in 4 bits; None: it is another's."""
    module, found, rest = name.rpartition(".weight.")
    if found and (rest in _PARTS or rest.startswith(_STATE)):
        return module, f"weight.{rest}"
    module, _, last = name.rpartition(".")
    # Stored bytes may pose as floats of one column; a float matrix has more than one of them.
    is_code = last == "weight" and tensor.dim() == 2 and 1 in tensor.shape and not is_left(module)
    return module, "weight" if is_code else None


def _scales(module: str, own: _Module) -> Tensor:
    """The magnitude of every block [blocks] float32.

    Raises:
        WeightsError: magnitudes in 8 bits, and what belongs to them, do not fit each other.
    """
    largest = own.tensors["weight.absmax"].flatten()
    if own.state is None or "nested_offset" not in own.state:
        if not largest.is_floating_point():
            raise WeightsError(
                f"{own.file}: tensor '{module}.weight.absmax' is {largest.dtype}: must be floats"
            )
        return largest.float()
    size = int(own.state.get("nested_blocksize", 256))
    outer, book = (own.tensors[f"weight.nested_{name}"] for name in ("absmax", "quant_map"))
    counts = -(-largest.numel() // size), 256
    if largest.dtype != torch.uint8 or (outer.numel(), *book.shape) != counts:
        raise WeightsError(
            f"{own.file}: '{module}.weight': absmax is {largest.dtype} [{largest.numel()}], nested_absmax "
            f"{list(outer.shape)}, nested_quant_map {list(book.shape)}; they must be torch.uint8, "
            f"[{counts[0]}] and [256]"
        )
    outer = outer.flatten().float().repeat_interleave(size)[: largest.numel()]
    inner = book.float()[largest.long()]
    return inner * outer + float(own.state["nested_offset"])


def _without_layouts(
    tensors: Iterable[tuple[str, Tensor, Path]],
) -> Iterator[tuple[str, Tensor, Path]]:
    """Without ``weight_format``: 0 says that rows follow each other.

    Raises: WeightsError: another layout.
    """
    for name, tensor, file in tensors:
        if name.rpartition(".")[2] != "weight_format":
            yield name, tensor, file
        elif tensor.numel() != 1 or int(tensor) != 0:
            raise WeightsError(
                f"{file}: tensor {name!r} = {tensor.flatten().tolist()!r:.80}: must be 0 (rows one after "
                "the other); save the model on the CPU"
            )
