"""``int8``, ``int8_weight_only``, ``experts_int8``, ``int4``, ``int4_g32``: any checkpoint, rounded while
it is loaded.

- ``int8``: weights in int8, a scale per output; activations in int8, a scale per token.
- ``int8_weight_only``: weights in int8, a scale per output; activations as they are.
- ``experts_int8``: the same of a mixture's experts; all other layers, the head too, as they are.
- ``int4``: weights in int4, a scale for every 128 inputs; activations as they are.
- ``int4_g32``: the same with a scale for every 32 inputs.

``lm_head`` is as with ``int8_weight_only`` in all others.

The embedding table stays as it is. A head that is tied to it is a copy made for the logits: the
table's rows are looked up in one place and multiplied in the other, and a decode step reads all of
the head but one row a token of the table.

``int8`` and ``int8_weight_only`` also read checkpoints that hold integers already: ``weight`` int8
[N, K] and ``weight_scale`` [N, 1] with ``{"quant_method": name}``, where the head is plain unless
``ignore`` says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.errors import ConfigError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed
from headrace_core.ops import OpTable, Rounding
from headrace_quant.config_checks import listed_names
from headrace_quant.ignored_layers import is_listed, module_names
from headrace_quant.int_linear_methods import RoundedWeight
from headrace_quant.none import PlainWeight
from headrace_quant.parted import method_by_name
from headrace_quant.stored_integers import StoredInt8

if TYPE_CHECKING:
    from torch import Tensor

HEAD = "lm_head"
_EXPERT = re.compile(r"\.experts\.\d+\.")
INT8 = Rounding(8)


class Online(QuantMethod):
    """Rounds any checkpoint to integers while it is loaded.

    Args:
        stored: names, or patterns after ``re:``, of plain layers of a checkpoint that holds
            integers; None: its weights are floats.
    """

    name: ClassVar[str]
    rounding: ClassVar[Rounding] = INT8
    """Rounding of every layer but the head."""
    activations: ClassVar[str] = "float"
    may_be_stored: ClassVar[bool] = False

    def __init__(self, ops: OpTable, *, stored: tuple[str, ...] | None = None) -> None:
        self.ops = ops
        self.stored = stored

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> Online:
        if config is None:
            return cls(ops)
        if config.get("quant_method") != cls.name or not cls.may_be_stored:
            raise ConfigError(
                f"quantization_config: quant_method = {config.get('quant_method')!r}: {cls.name!r} "
                f"reads {'its own' if cls.may_be_stored else 'no stored'} integers"
            )
        for key in config:
            if key not in ("quant_method", "ignore"):
                raise ConfigError(
                    f"quantization_config: {key} = {config[key]!r}: {cls.name!r} takes only "
                    "quant_method and ignore"
                )
        return cls(ops, stored=tuple(listed_names("ignore", config.get("ignore", [HEAD]))))

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        if self.stored is not None:
            plain = self.stored
            return method_by_name(spec, lambda name: is_listed(name, plain), self._stored)
        if spec.name.rpartition(".")[2] == HEAD:
            return RoundedWeight(self.ops, INT8, activations="float")
        return RoundedWeight(self.ops, self.rounding, activations=self.activations)

    def _stored(self, is_plain: bool) -> LinearMethod:
        if is_plain:
            return PlainWeight(self.ops)
        return StoredInt8(self.ops, activations=self.activations)


class Int8(Online):
    name: ClassVar[str] = "int8"
    activations: ClassVar[str] = "int8"
    may_be_stored: ClassVar[bool] = True


class Int8WeightOnly(Online):
    name: ClassVar[str] = "int8_weight_only"
    may_be_stored: ClassVar[bool] = True


class ExpertsInt8(Online):
    """Rounds experts of mixtures, and leaves all else."""

    name: ClassVar[str] = "experts_int8"
    found_experts = False
    """A layer of experts was among those that were asked for."""

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        if not all(_EXPERT.search(name) for name in module_names(spec)):
            return PlainWeight(self.ops)
        self.found_experts = True
        return super().for_layer(spec)

    def decode(
        self,
        tensors: Iterable[tuple[str, Tensor, Path]],
        dtype: str,
        passes_over: Callable[[str], bool],
    ) -> Iterable[tuple[str, Tensor, Path]]:
        """Raises: ConfigError: there are no experts to round."""
        if not self.found_experts:
            raise ConfigError(
                f"model.quantization = {self.name!r}: the model has no experts; 'int8_weight_only' rounds "
                "all linear layers so",
                field="model.quantization",
            )
        return tensors


class Int4(Online):
    name: ClassVar[str] = "int4"
    rounding: ClassVar[Rounding] = Rounding(4, 128)


class Int4Group32(Online):
    name: ClassVar[str] = "int4_g32"
    rounding: ClassVar[Rounding] = Rounding(4, 32)
