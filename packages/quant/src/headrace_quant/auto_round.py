"""``auto-round``: integers of 2, 3, 4 or 8 bits that AutoRound found, in the layout of GPTQ or of AWQ.

``packing_format`` says which: ``auto_round:auto_gptq`` (:mod:`headrace_quant.gptq`, zero points less 1) or
``auto_round:auto_awq`` (:mod:`headrace_quant.awq`); older files have it in ``backend``. ``extra_config`` has
other settings of single modules, by their names or by patterns of them.

Sources: Cheng et al. 2023, arXiv:2309.05516; github.com/intel/auto-round (its export formats).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace_core.errors import ConfigError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed
from headrace_core.ops import OpTable
from headrace_quant.awq import BITS as AWQ_BITS
from headrace_quant.awq import AWQWeight
from headrace_quant.config_checks import refusal
from headrace_quant.gptq import HEAD, GPTQFormat, GPTQWeight, read_format
from headrace_quant.none import PlainWeight
from headrace_quant.parted import method_by_name

PLAIN_FROM = 16
"""A module of so many bits is in floats."""


@dataclass(frozen=True, slots=True)
class Extra:
    """An entry of ``extra_config``."""

    name: str
    """A module's name, or a pattern of names."""
    form: GPTQFormat | None
    """None: in floats."""

    def means(self, name: str) -> bool:
        """True if the entry is about the module of a name."""
        if name == self.name:
            return True
        try:
            return re.fullmatch(self.name, name) is not None
        except re.error:
            return False  # a name, not a pattern


class AutoRound(QuantMethod):
    """Integers that AutoRound found.

    Args:
        as_awq: layers have AWQ's tensors; else GPTQ's.
        form: of modules that no entry of ``extra`` names.
        blocks: beginnings of the names of quantized modules; empty: all but the head.
    """

    name: ClassVar[str] = "auto-round"

    def __init__(
        self,
        ops: OpTable,
        form: GPTQFormat,
        *,
        as_awq: bool = False,
        extra: Sequence[Extra] = (),
        blocks: Sequence[str] = (),
    ) -> None:
        self.ops, self.form, self.as_awq = ops, form, as_awq
        self.extra, self.blocks = tuple(extra), tuple(blocks)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> AutoRound:
        if config is None:
            raise ConfigError(
                "quantization 'auto-round' needs a checkpoint made with it; 'int4' quantizes while loading",
                field="model.quantization",
            )
        as_awq = _is_awq(config)
        form = _form(config, GPTQFormat(), "", as_awq=as_awq)
        if form is None:
            raise refusal("bits", config.get("bits"), "2, 3, 4 or 8")
        extra = config.get("extra_config") or {}
        if not isinstance(extra, Mapping):
            raise refusal("extra_config", extra, "an object of modules")
        return cls(
            ops,
            form,
            as_awq=as_awq,
            extra=[
                Extra(name, _form(fields, form, f"extra_config[{name!r}].", as_awq=as_awq))
                for name, fields in extra.items()
            ],
            blocks=_blocks(config.get("block_name_to_quantize")),
        )

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        return method_by_name(spec, self._form_of, self._method)

    def _method(self, form: GPTQFormat | None) -> LinearMethod:
        if form is None:
            return PlainWeight(self.ops)
        if self.as_awq:
            return AWQWeight(self.ops, form.group_size)
        return GPTQWeight(self.ops, form)

    def _form_of(self, name: str) -> GPTQFormat | None:
        for entry in self.extra:
            if entry.means(name):
                return entry.form
        if name.rpartition(".")[2] == HEAD:
            return None
        if self.blocks and not any(name.startswith(f"{block}.") for block in self.blocks):
            return None
        return self.form


def _is_awq(config: Mapping[str, Any]) -> bool:
    key = "packing_format" if config.get("packing_format") else "backend"
    stated = config.get(key) or "auto_round:auto_gptq"
    if not isinstance(stated, str):
        raise refusal(key, stated, "a text")
    if "awq" in stated:
        return True
    layouts = ("auto", "gptq", "marlin", "ipex", "exllama", "tritonv2")
    if "zp" in stated or not any(layout in stated for layout in layouts):
        raise refusal(key, stated, "'auto_round:auto_gptq' or 'auto_round:auto_awq'")
    return False


def _form(fields: object, default: GPTQFormat, path: str, *, as_awq: bool) -> GPTQFormat | None:
    """The format of a module's tensors; None: floats.

    Raises:
        ConfigError: a value that is not served; names the key.
    """
    if not isinstance(fields, Mapping):
        raise refusal(path.rstrip("."), fields, "an object")
    bits = fields.get("bits", default.bits)
    if type(bits) is int and bits >= PLAIN_FROM:
        return None
    kind = fields.get("data_type") or "int"
    if kind not in ("int", "int_sym", "int_asym"):
        raise refusal(f"{path}data_type", kind, "'int'")
    form = read_format({**fields, "bits": bits, "desc_act": False}, default, path)
    if as_awq and form.bits != AWQ_BITS:
        raise refusal(f"{path}bits", bits, f"{AWQ_BITS} in the layout of AWQ")
    return form


def _blocks(named: object) -> list[str]:
    """``block_name_to_quantize``: names, in a list or between commas."""
    if not named:
        return []
    names = named.split(",") if isinstance(named, str) else named
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise refusal("block_name_to_quantize", named, "a name, or a list of names")
    return [name.strip() for name in names]
