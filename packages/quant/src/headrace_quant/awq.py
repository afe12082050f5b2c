"""``awq``: integers of 4 bits as AutoAWQ writes them (version ``gemm``).

A linear layer with K inputs, N outputs and groups of G inputs has ``qweight`` int32 [K, N / 8], ``qzeros``
int32 [K / G, N / 8] and ``scales`` [K / G, N], and means
``W[n, k] = scales[g, n] * (q[k, n] - z[g, n])``, g being ``k // G``. A word holds eight neighbouring
outputs; its nibbles, lowest first, are those at the places :data:`ORDER`.

Sources: Lin et al. 2023, arXiv:2306.00978; the layout: github.com/casper-hansen/AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import ConfigError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed, TensorSpec
from headrace_core.ops import OpTable, PackedLinear, QuantizedWeight
from headrace_quant.bits import signed, unpack_rows
from headrace_quant.config_checks import (
    listed_names,
    refusal,
    uneven_inputs,
    uneven_outputs,
    warn_of_unknown,
)
from headrace_quant.int_linear_methods import IntegerMethod, checked_scales, scale_spec
from headrace_quant.none import PlainWeight
from headrace_quant.parted import method_by_name

if TYPE_CHECKING:
    from torch import Tensor

BITS = 4
PER_WORD = 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of each nibble of a word, less the word's first."""
HEAD = "lm_head"


_KNOWN = (
    "quant_method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "backend",
    "modules_to_not_convert", "do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config",
)  # fmt: skip
"""Keys that AutoAWQ and transformers write."""


class AWQWeight(IntegerMethod):
    """The layer of the module's description.

    Args:
        group_size: None: one group.
        stored_as: the checkpoint's name of the codes, for messages.
    """

    def __init__(self, ops: OpTable, group_size: int | None, *, stored_as: str = "qweight") -> None:
        super().__init__(ops, activations="float")
        self.group_size, self.stored_as = group_size, stored_as

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        inputs, outputs = spec.in_features, spec.out_features
        size = self.group_size or inputs
        if inputs % size:
            raise uneven_inputs(spec, self.stored_as, size, "group_size")
        if any(part % PER_WORD for part in spec.out_parts):
            raise uneven_outputs(spec, self.stored_as, PER_WORD, "values of a word")
        in_dim = None if self.group_size is None else 0
        words = outputs // PER_WORD
        return {
            "qweight": TensorSpec((inputs, words), "int32", part_dim=1, in_dim=0),
            "qzeros": TensorSpec((inputs // size, words), "int32", part_dim=1, in_dim=in_dim),
            "scales": replace(scale_spec((inputs // size, outputs), in_dim), part_dim=1),
        }

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        weight = QuantizedWeight(
            signed(_unpacked(tensors["qweight"]), BITS).T.contiguous(),
            checked_scales(spec, tensors["scales"].T),
            signed(_unpacked(tensors["qzeros"]), BITS).T.contiguous(),
            bits=BITS,
            group_size=self.group_size,
        )
        return self.pack(spec, weight)


def _unpacked(words: Tensor) -> Tensor:
    """words [R, N / 8] int32 -> values [R, N] uint8, outputs in their order."""
    nibbles = unpack_rows(words, BITS).view(words.shape[0], -1, PER_WORD)
    values = torch.empty_like(nibbles)
    values[..., list(ORDER)] = nibbles
    return values.view(words.shape[0], -1)


class AWQ(QuantMethod):
    """Integers of 4 bits as AutoAWQ writes them.

    Args:
        ignore: pieces of the names of modules that are left in floats.
    """

    name: ClassVar[str] = "awq"

    def __init__(self, ops: OpTable, group_size: int | None, ignore: tuple[str, ...] = ()) -> None:
        self.ops, self.group_size, self.ignore = ops, group_size, ignore

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> AWQ:
        if config is None:
            raise ConfigError(
                "quantization 'awq' needs a checkpoint made with it; 'int4' quantizes while loading",
                field="model.quantization",
            )
        warn_of_unknown(cls.name, config, _KNOWN)
        bits = config.get("bits", config.get("w_bit", BITS))
        if bits != BITS:
            raise refusal("bits" if "bits" in config else "w_bit", bits, str(BITS))
        version = config.get("version") or "gemm"
        if not isinstance(version, str) or version.lower() != "gemm":
            raise refusal("version", version, "'gemm': others lay their tensors out differently")
        if config.get("zero_point", True) is not True:
            raise refusal("zero_point", config["zero_point"], "true")
        size = config.get("group_size", config.get("q_group_size", 128))
        if type(size) is not int or (size < 8 and size != -1):
            raise refusal("group_size", size, "-1 (one group), or at least 8")
        ignore = listed_names("modules_to_not_convert", config.get("modules_to_not_convert") or [])
        return cls(ops, None if size == -1 else size, tuple(ignore))

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        return method_by_name(spec, self._is_left, self._method)

    def _method(self, is_left: bool) -> LinearMethod:
        return PlainWeight(self.ops) if is_left else AWQWeight(self.ops, self.group_size)

    def _is_left(self, name: str) -> bool:
        return name.rpartition(".")[2] == HEAD or any(piece in name for piece in self.ignore)
