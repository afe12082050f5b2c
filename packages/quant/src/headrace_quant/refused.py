"""Formats that are known and not read: each is refused by its name, with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

from headrace_core.errors import ConfigError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed
from headrace_core.ops import OpTable


class RefusedMethod(QuantMethod):
    """A format that is not read."""

    why: ClassVar[str]
    """The reason, and what to do."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> NoReturn:
        raise ConfigError(f"quantization {cls.name!r}: {cls.why}", field="model.quantization")

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return [cls.why]

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        raise NotImplementedError(self.name)


class DeepSpeedFP(RefusedMethod):
    """Floats of 6 and 8 bits that only DeepSpeed's GPU kernels lay out."""

    name: ClassVar[str] = "deepspeedfp"
    why: ClassVar[str] = (
        "DeepSpeed's layout of 6-bit and 8-bit floats is not read; 'fp8', 'mxfp4' and 'int8' round an "
        "ordinary checkpoint while loading"
    )
