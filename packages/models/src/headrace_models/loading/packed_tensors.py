"""Tensors that belong to packed weights: what becomes of those that are made floats, and what messages say of
them; the config decides how they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headrace_core.config import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

Named = tuple[str, "Tensor", Path]
"""Name, tensor and file."""

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


def decoded(
    tensors: Iterable[Named],
    decode: Callable[[Iterable[Named]], Iterable[Named]],
    is_transposed: Callable[[str], bool],
) -> Iterator[Named]:
    """The tensors that ``decode`` makes of a checkpoint's. Weights that it makes floats come as plain
    checkpoints store them: quantizers turn GPT-2's Conv1D, [in, out], before they round it.

    Args:
        is_transposed: true of the name of a weight that plain checkpoints store [in, out].
    """
    coded: set[str] = set()

    def noted() -> Iterator[Named]:
        for name, tensor, file in tensors:
            if _dtype(tensor) not in DTYPES:
                coded.add(name.rpartition(".")[0])
            yield name, tensor, file

    for name, tensor, file in decode(noted()):
        is_made = name.rpartition(".")[0] in coded and _dtype(tensor) in DTYPES
        turns = is_made and tensor.dim() == 2 and is_transposed(name)
        yield name, tensor.T if turns else tensor, file


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


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
