"""``gptq``: integers of 2, 3, 4 or 8 bits as GPTQModel and AutoGPTQ write them.

A linear layer with K inputs, N outputs and groups of G inputs has

================  ==========================  =====================================================
``qweight``       int32 [K * bits / 32, N]    packed along the inputs (:mod:`headrace_quant.bits`)
``qzeros``        int32 [K / G, N * bits / 32]  packed along the outputs; ``gptq``: less 1
``scales``        float [K / G, N]
``g_idx``         int32 [K]                   the group of each input
================  ==========================  =====================================================

and means ``W[n, k] = scales[g, n] * (q[k, n] - z[g, n])``, g being ``g_idx[k]``. With ``desc_act`` inputs
were quantized in the order of their importance, and ``g_idx`` is in no order: weights are then held
sorted by group, and activations are brought into the same order before they are multiplied.

Sources: Frantar et al. 2022, arXiv:2210.17323; the layout: github.com/ModelCloud/GPTQModel. In the
format ``gptq`` a zero point of 0 is stored as the largest value (0 less 1, cut to the bits).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from headrace_core.errors import ConfigError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed, TensorSpec
from headrace_core.ops import OpTable, PackedLinear, QuantizedWeight
from headrace_quant.bits import WIDTHS, held_bits, signed, unpack_rows, words_for
from headrace_quant.config_checks import refusal, uneven_inputs, uneven_outputs
from headrace_quant.int_linear_methods import checked_scales, scale_spec
from headrace_quant.none import PlainWeight
from headrace_quant.parted import method_by_name
from headrace_quant.sorted_inputs import Sorted, SortedMethod, sorted_order

if TYPE_CHECKING:
    from torch import Tensor

HEAD = "lm_head"
FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True, slots=True)
class GPTQFormat:
    """The format of one layer's tensors."""

    bits: int = 4
    group_size: int | None = 128
    """None: one group."""
    by_importance: bool = False
    """``desc_act``: ``g_idx`` is in no order."""
    zeros_less_one: bool = True
    """The format ``gptq``; else ``gptq_v2``."""


class GPTQWeight(SortedMethod):
    """The layer of the module's table.

    Raises (from ``create``):
        ConfigError: words or groups do not end with the layer's inputs or outputs.
    """

    def __init__(self, ops: OpTable, form: GPTQFormat) -> None:
        super().__init__(ops, activations="float")
        self.form = form

    @property
    def needs_whole(self) -> bool:  # type: ignore[override]
        """A rank's inputs belong to any groups where they were sorted by importance."""
        return self.form.by_importance

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        bits, inputs, outputs = self.form.bits, spec.in_features, spec.out_features
        size = self.form.group_size or inputs
        if inputs % size:
            raise uneven_inputs(spec, "qweight", size, "group_size")
        by, words = 32 // math.gcd(32, bits), f"words of 32 bits, values of {bits}"
        if words_for(inputs, bits) < 0:
            raise uneven_inputs(spec, "qweight", by, words)
        if any(words_for(part, bits) < 0 for part in spec.out_parts):
            raise uneven_outputs(spec, "qzeros", by, words)
        groups = inputs // size
        in_dim = None if self.form.group_size is None else 0
        return {
            "qweight": TensorSpec(
                (words_for(inputs, bits), outputs), "int32", part_dim=1, in_dim=0
            ),
            "qzeros": TensorSpec(
                (groups, words_for(outputs, bits)), "int32", part_dim=1, in_dim=in_dim
            ),
            "scales": replace(scale_spec((groups, outputs), in_dim), part_dim=1),
            "g_idx": TensorSpec((inputs,), "int32", part_dim=None, in_dim=0, required=False),
        }

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear | Sorted:
        bits = self.form.bits
        values = unpack_rows(tensors["qweight"].T, bits)
        zeros = unpack_rows(tensors["qzeros"], bits)
        if self.form.zeros_less_one:
            zeros = (zeros + 1) & ((1 << bits) - 1)
        order, groups, size = None, tensors.get("g_idx"), self.form.group_size
        if groups is not None and size is not None:
            order = sorted_order(spec, groups, size, "g_idx")
        if order is not None:
            values = values[:, order]
        weight = QuantizedWeight(
            signed(values, bits),
            checked_scales(spec, tensors["scales"].T),
            signed(zeros, bits).T.contiguous(),
            bits=held_bits(bits),
            group_size=self.form.group_size,
        )
        packed = self.pack(spec, weight)
        return packed if order is None else Sorted(order, packed)


class Rule(NamedTuple):
    """An entry of ``dynamic``."""

    pattern: re.Pattern[str]
    form: GPTQFormat | None
    """None: the module is left in floats."""


class GPTQ(QuantMethod):
    """Integers as GPTQModel and AutoGPTQ write them.

    Args:
        form: of modules that no rule names.
        rules: the first that matches a module's name decides.
        quantizes_head: ``lm_head`` is quantized as well.
        within: last parts of the names of quantized modules; None: all are.
    """

    name: ClassVar[str] = "gptq"

    def __init__(
        self,
        ops: OpTable,
        form: GPTQFormat,
        rules: tuple[Rule, ...] = (),
        *,
        quantizes_head: bool = False,
        within: frozenset[str] | None = None,
    ) -> None:
        self.ops, self.form, self.rules = ops, form, rules
        self.quantizes_head, self.within = quantizes_head, within

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> GPTQ:
        if config is None:
            raise ConfigError(
                "quantization 'gptq' needs a checkpoint made with it; 'int4' quantizes while loading",
                field="model.quantization",
            )
        if config.get("quant_method") == "bitblas":
            raise refusal(
                "quant_method",
                "bitblas",
                "'gptq': bytes of BitBLAS's own layout may be permuted for a GPU, which no key says",
            )
        if config.get("linear_quant_method") not in (None, "gptq"):
            raise refusal("linear_quant_method", config["linear_quant_method"], "'gptq'")
        stored = config.get("checkpoint_format") or "gptq"
        if stored not in FORMATS:
            raise refusal("checkpoint_format", stored, " or ".join(map(repr, FORMATS)))
        if config.get("pack_dtype", "int32") not in ("int32", None):
            raise refusal("pack_dtype", config["pack_dtype"], "'int32'")
        plain = GPTQFormat(zeros_less_one=stored == "gptq")
        form = read_format(config, plain, "")
        return cls(
            ops,
            form,
            _rules(config.get("dynamic"), form),
            quantizes_head=bool(config.get("lm_head", False)),
            within=_within(config.get("modules_in_block_to_quantize")),
        )

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        return method_by_name(spec, self._form_of, self._method)

    def _method(self, form: GPTQFormat | None) -> LinearMethod:
        return PlainWeight(self.ops) if form is None else GPTQWeight(self.ops, form)

    def _form_of(self, name: str) -> GPTQFormat | None:
        for rule in self.rules:
            if rule.pattern.match(name):
                return rule.form
        if name.rpartition(".")[2] == HEAD:
            return self.form if self.quantizes_head else None
        if self.within is not None and not any(name.endswith(f".{end}") for end in self.within):
            return None
        return self.form


def read_format(fields: Mapping[str, Any], default: GPTQFormat, path: str) -> GPTQFormat:
    """The fields that change tensors, over a default.

    Raises:
        ConfigError: a value that is not served; names the key.
    """
    bits = fields.get("bits", default.bits)
    if type(bits) is not int or bits not in WIDTHS:
        raise refusal(f"{path}bits", bits, " or ".join(map(str, WIDTHS)))
    size = fields.get("group_size", default.group_size or -1)
    if type(size) is not int or (size < 8 and size != -1):
        raise refusal(f"{path}group_size", size, "-1 (one group), or at least 8")
    by_importance = fields.get("desc_act", default.by_importance)
    if type(by_importance) is not bool:
        raise refusal(f"{path}desc_act", by_importance, "true or false")
    return replace(
        default,
        bits=bits,
        group_size=None if size == -1 else size,
        by_importance=by_importance and size != -1,
    )


def _rules(dynamic: object, form: GPTQFormat) -> tuple[Rule, ...]:
    if dynamic is None:
        return ()
    if not isinstance(dynamic, Mapping):
        raise refusal("dynamic", dynamic, "an object of patterns")
    rules = []
    for key, fields in dynamic.items():
        path = f"dynamic[{key!r}]."
        left_alone = key.startswith("-:")
        try:
            pattern = re.compile(key.removeprefix("-:").removeprefix("+:"))
        except re.error as error:
            raise ConfigError(
                f"quantization_config: dynamic: {key!r} is not a pattern: {error}"
            ) from error
        if not left_alone and not isinstance(fields, Mapping):
            raise refusal(f"dynamic[{key!r}]", fields, "an object")
        rules.append(Rule(pattern, None if left_alone else read_format(fields, form, path)))
    return tuple(rules)


def _within(named: object) -> frozenset[str] | None:
    """``modules_in_block_to_quantize``: lists of names below a block."""
    if not named:
        return None
    lists = named if isinstance(named, list) else [named]
    flat = [name for item in lists for name in (item if isinstance(item, list) else [item])]
    names = frozenset(name for name in flat if isinstance(name, str))
    if len(names) < len(set(map(repr, flat))):
        raise refusal("modules_in_block_to_quantize", named, "lists of names")
    return names
