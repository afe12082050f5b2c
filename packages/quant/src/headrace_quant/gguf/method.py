"""``gguf``: weights in the blocks of a GGUF file.

``weight`` uint8 [N, bytes of a row] of the modules that ``types`` names; every other weight is plain. Blocks
stay packed (:mod:`headrace_quant.gguf.packing`) and are multiplied with activations as they are; tensors
that no layer can hold in blocks become floats while they are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core import plugins
from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed, TensorSpec
from headrace_core.ops import OpTable, PackedLinear
from headrace_quant.config_checks import refusal
from headrace_quant.gguf.blocks import KINDS
from headrace_quant.gguf.packing import floats, packed_weight
from headrace_quant.ignored_layers import module_names
from headrace_quant.int_linear_methods import IntegerMethod
from headrace_quant.none import PlainWeight
from headrace_quant.parted import method_by_name

if TYPE_CHECKING:
    from torch import Tensor

_KEYS = ("quant_method", "types", "requantize")
_REMEDY = (
    "set another tensor_parallel_size, or --quantization none, which makes floats of all blocks"
)


class BlockWeight(IntegerMethod):
    """``weight`` uint8 [N, bytes of a row], of blocks of one type.

    Args:
        kind: name of the type (``Q4_K``).
    """

    takes_views = True

    def __init__(self, ops: OpTable, kind: str) -> None:
        super().__init__(ops, activations="float")
        self.kind = kind

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        """Raises: ConfigError: the inputs, or those of this rank, do not end where a block does."""
        kind = KINDS[self.kind]
        if spec.in_features % kind.elements:
            raise ConfigError(
                f"layer {spec.name!r}: weight {[spec.out_features, spec.in_features]} of this rank: "
                f"rows of {spec.in_features} numbers are not whole blocks of {kind.elements} ({self.kind}): "
                f"{_REMEDY}",
                field="parallel.tensor_parallel_size",
            )
        row = spec.in_features // kind.elements * kind.num_bytes
        return {"weight": TensorSpec((spec.out_features, row), "uint8", in_dim=1)}

    def kept_bytes(self, spec: LinearSpec) -> int | None:
        kind = KINDS[self.kind]
        if kind.kept_bytes is None:
            return None
        return spec.out_features * (spec.in_features // kind.elements) * kind.kept_bytes

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        try:
            weight = packed_weight(self.kind, tensors["weight"])
        except ValueError as error:
            raise WeightsError(f"layer {spec.name!r}: {error}: the file is damaged") from None
        return self.pack(spec, weight)

    def rows(self, state: PackedLinear, ids: Tensor) -> Tensor:
        """Rows of the weight: ids [T] int64 -> [T, in_features], in the activations' dtype."""
        return self.ops.quant_linear.rows(ids, state)


class Gguf(QuantMethod):
    """Weights in blocks.

    Args:
        types: module -> type of its weight's blocks; ``*`` stands for the number of an expert.
        requantize: a method that takes floats: all blocks become floats, and it has every layer.
    """

    name: ClassVar[str] = "gguf"

    def __init__(
        self, ops: OpTable, types: Mapping[str, str], requantize: QuantMethod | None = None
    ) -> None:
        self.ops = ops
        self.types = types
        self.requantize = requantize
        self.packed: set[str] = set()
        """Modules whose layers hold blocks."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> Gguf:
        if config is None:
            raise ConfigError(
                "quantization 'gguf' needs a GGUF file; 'q4_k', 'q5_k', 'q6_k', 'q8_0' and 'q4_0' make such "
                "blocks of floats while loading",
                field="model.quantization",
            )
        for key, value in config.items():
            if key not in _KEYS:
                raise refusal(key, value, "absent: gguf has no such key")
        if config.get("quant_method") != cls.name:
            raise refusal("quant_method", config.get("quant_method"), repr(cls.name))
        types = config.get("types")
        if not isinstance(types, Mapping):
            raise refusal("types", types, "an object: module -> type of blocks")
        for module, kind in types.items():
            if kind not in KINDS:
                raise refusal(f"types.{module}", kind, f"one of {', '.join(KINDS)}")
        wanted = config.get("requantize")
        return cls(ops, types, None if wanted is None else _online(wanted, ops))

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        if self.requantize is not None:
            return self.requantize.for_layer(spec)
        self.packed.update(name for name in module_names(spec) if self._type(name))
        return method_by_name(spec, self._type, self._method)

    def for_table(self, spec: LinearSpec) -> BlockWeight | None:
        """The method of a table of vectors [out_features, in_features], which can also multiply; None: it is
        plain."""
        kind = None if self.requantize is not None else self._type(spec.name)
        if kind is None:
            return None
        self.packed.add(spec.name)
        return BlockWeight(self.ops, kind)

    def decode(
        self,
        tensors: Iterable[tuple[str, Tensor, Path]],
        dtype: str,
        passes_over: Callable[[str], bool],
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """See :meth:`headrace_core.linear.QuantMethod.decode`; blocks of :meth:`for_layer`'s and
        :meth:`for_table`'s modules stay blocks."""
        for name, tensor, file in tensors:
            module, _, suffix = name.rpartition(".")
            kind = self._type(module) if suffix == "weight" else None
            if kind is None or module in self.packed or passes_over(name):
                yield name, tensor, file
                continue
            size = KINDS[kind].num_bytes
            if tensor.dtype != torch.uint8 or not tensor.dim() or tensor.shape[-1] % size:
                raise WeightsError(
                    f"{file}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}: rows of blocks of "
                    f"{size} bytes ({kind}) are needed"
                )
            yield name, floats(kind, tensor, getattr(torch, dtype)), file

    def _type(self, module: str) -> str | None:
        """Type of the blocks of a module's weight; None: it is plain."""
        return self.types.get(module) or self.types.get(re.sub(r"\.\d+(?=\.\w+$)", ".*", module))

    def _method(self, kind: str | None) -> LinearMethod:
        return PlainWeight(self.ops) if kind is None else BlockWeight(self.ops, kind)


def _online(name: str, ops: OpTable) -> QuantMethod:
    """A method that takes a checkpoint of floats.

    Raises:
        ConfigError: it does not; names it and ``gguf``.
    """
    method: type[QuantMethod] = plugins.load("headrace.quantization", name)
    try:
        return method.from_config(None, ops)
    except ConfigError as error:
        raise ConfigError(
            f"model.quantization = {name!r}: the checkpoint is quantized with 'gguf'; leave the setting out, "
            f"give that name, or one that rounds floats ('int8', 'int4') or leaves them ('none'): {error}",
            field="model.quantization",
        ) from error
