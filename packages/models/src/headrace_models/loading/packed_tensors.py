"""What messages say of tensors that belong to packed weights: the config decides how they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from headrace_core.config import DTYPES

_SUFFIXES = (
    "qweight", "qzeros", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2",
    "weight_zero_point", "SCB", "absmax", "quant_map", "_blocks", "qdata",
)  # fmt: skip
"""Ends of names of tensors that plain checkpoints do not have."""
_LACKS = (
    ": it is packed, but config.json has no quantization_config: take the one that was published with these "
    "weights (or its quantize_config.json)"
)

_DECIDING = (
    "quant_method", "bits", "group_size", "format", "load_in_4bit", "load_in_8bit", "quant_algo",
    "weight_block_size",
)  # fmt: skip
"""Keys that decide shapes and dtypes in most formats."""


class HasDtype(Protocol):
    """A slot of a model."""

    @property
    def dtype(self) -> str | None: ...


def config_hint(block: Mapping[str, Any] | None, slot: HasDtype, dtype: str) -> str:
    """What a message about a tensor's shape or dtype ends with.

    Args:
        block: ``quantization_config``; None: the config has none.
        slot: that the tensor does not fit.
        dtype: the tensor's.
    """
    if block is None:
        return "" if dtype in DTYPES else _LACKS
    if slot.dtype is None:
        return ""
    said = ", ".join(f"{key} {block[key]!r:.40}" for key in _DECIDING if key in block)
    return f" by its quantization_config ({said})"


def left_over_hint(block: Mapping[str, Any] | None, tensors: Iterable[str]) -> str:
    """What a message about tensors that belong nowhere ends with.

    Args:
        tensors: texts that name one each, quoted.
    """
    ends = tuple(f"{suffix}'" for suffix in _SUFFIXES)
    if block is None and any(end in text for text in tensors for end in ends):
        return _LACKS.replace(": it is", ". Weights are", 1)
    return ""


def is_packed(name: str) -> bool:
    """True if the tensor is one that plain checkpoints do not have."""
    return name.rpartition(".")[2] in _SUFFIXES
