"""``mxfp4``: experts whose weights are 4-bit floats in blocks of 32 with a scale, as gpt-oss has them; or any
checkpoint, rounded to them while it is loaded.

A layer of N outputs and K inputs has ``weight_blocks`` uint8 [N, K / 32, 16], two codes of E2M1 a byte, the
lower half first, and ``weight_scales`` uint8 [N, K / 32], exponents of 2 plus 127. Both stay packed. Layers
that ``modules_to_not_convert`` names, and all that are no experts, are floats in the checkpoint.

While loading, every linear layer but the head is rounded: a block's scale is the power of two of its
largest magnitude over 4; values are rounded to the nearest, ties to the even code, and cut at 6.

Sources: OCP Microscaling Formats (MX) specification 1.0, sections 5.3.3 and 6.3; layout: OpenAI 2025,
arXiv:2508.10925.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from headrace_core.errors import ConfigError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed
from headrace_core.ops import OpTable
from headrace_quant.code_books import E2M1
from headrace_quant.config_checks import listed_names
from headrace_quant.ignored_layers import module_names
from headrace_quant.none import PlainWeight
from headrace_quant.rounded_floats import CodeBook, RoundedFloats
from headrace_quant.small_floats import FloatLayout, SmallFloatWeight

HEAD = "lm_head"
BLOCK = 32
"""Values that share a scale."""
STORED = FloatLayout("e2m1", "weight_blocks", "weight_scales", in_blocks=True)
BOOK = CodeBook(E2M1, BLOCK, in_powers=True)
_EXPERT = re.compile(r"\.experts\.\d+\.")
_KNOWN = ("quant_method", "modules_to_not_convert")


class Mxfp4(QuantMethod):
    """Experts in blocks, everything else plain; or every layer rounded.

    Args:
        ignore: names of modules in floats, or their beginnings, with ``*`` for anything; None: the
            checkpoint holds floats.
    """

    name: ClassVar[str] = "mxfp4"

    def __init__(self, ops: OpTable, ignore: Sequence[str] | None) -> None:
        self.ops = ops
        self.ignore = None if ignore is None else [_pattern(entry) for entry in ignore]

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> Mxfp4:
        if config is None:
            return cls(ops, None)
        unknown = sorted(key for key in config if key not in _KNOWN and config[key] is not None)
        key = "modules_to_not_convert"
        if unknown:
            raise ConfigError(f"quantization_config: {', '.join(unknown)}: mxfp4 has no such key")
        return cls(ops, listed_names(key, config.get(key) or []))

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        names = module_names(spec)
        if self.ignore is None:
            is_head = spec.name.rpartition(".")[2] == HEAD
            return PlainWeight(self.ops) if is_head else RoundedFloats(self.ops, BOOK)
        ignored = any(entry.match(name) for entry in self.ignore for name in names)
        if ignored or not all(_EXPERT.search(name) for name in names):
            return PlainWeight(self.ops)
        return SmallFloatWeight(self.ops, STORED)


def _pattern(entry: str) -> re.Pattern[str]:
    """A name or the beginning of one, with ``*`` for anything."""
    return re.compile(".*".join(map(re.escape, entry.split("*"))) + r"(\.|$)")
