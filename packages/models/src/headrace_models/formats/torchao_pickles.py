"""TorchAO's tensors in PyTorch's own files, as the plain tensors that they are made of.

TorchAO 0.13 and later writes ``weight`` as a subclass of ``torch.Tensor`` with attributes ``qdata``,
``scale``, and ``zero_point`` where there is one. They become ``_weight_qdata`` and so on, as TorchAO names
them in safetensors files. Its classes are not imported: what the file names as one of them is built of
classes of this module, which do nothing.

Source: github.com/pytorch/ao (0.18: ``quantization/quantize_/workflows``, ``prototype/safetensors``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from headrace_core.errors import WeightsError

_LIBRARY = "torchao."
_TENSORS = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Int4Tensor", "Float8Tensor")
"""Classes whose attributes are known."""


class StoredTensor(Tensor):
    """Stands for one of TorchAO's tensors. Nothing computes with it."""

    @classmethod
    def __torch_dispatch__(cls, op: object, *_: object) -> object:
        """torch wants one of a tensor without storage."""
        raise WeightsError(f"{op} of a tensor that is only read")


class _Setting:
    """Stands for any other object of TorchAO's: how activations are rounded, which kernel is preferred."""

    def __init__(self, *_: object) -> None:
        """Of whatever the library's own class is made of."""


def stand_ins(file: Path) -> Sequence[tuple[type, str]]:
    """What :class:`torch.serialization.safe_globals` takes, for the names of TorchAO's in a pickled file;
    nothing is built.

    Raises:
        WeightsError: the file has a kind of TorchAO's tensors that is not read.
    """
    found = []
    for name in torch.serialization.get_unsafe_globals_in_checkpoint(file):
        kind = name.rpartition(".")[2]
        if not name.startswith(_LIBRARY):
            continue
        if kind.endswith(("Tensor", "TensorImpl")) and kind not in _TENSORS:
            raise WeightsError(
                f"{file}: has TorchAO's {kind}, which is not read; these are: {', '.join(_TENSORS)}. "
                "Quantize the model again with TorchAO 0.13 or later"
            )
        found.append((_class_for(kind), name))
    return found


def _class_for(kind: str) -> type:
    """A class of its own for each name, as the unpickler tells them apart."""
    base = StoredTensor if kind in _TENSORS else _Setting
    return type(kind, (base,), {"__module__": __name__})


def plain_parts(file: Path, name: str, stored: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of what a tensor of TorchAO's is made of; any other tensor comes back as it is.

    Raises:
        WeightsError: it has no ``qdata`` or no ``scale``, or is made of such tensors itself.
    """
    if not isinstance(stored, StoredTensor):
        yield name, stored
        return
    parts = {key: part for key, part in vars(stored).items() if isinstance(part, Tensor)}
    _check_parts(file, name, stored, parts)
    module, _, last = name.rpartition(".")
    for key, part in parts.items():
        yield f"{module}{'.' if module else ''}_{last}_{key}", part


def _check_parts(file: Path, name: str, stored: Tensor, parts: Mapping[str, Tensor]) -> None:
    kind = f"{file}: tensor {name!r}, TorchAO's {type(stored).__name__},"
    for wanted in ("qdata", "scale"):
        if wanted not in parts:
            raise WeightsError(f"{kind} has no {wanted}")
    for key, part in parts.items():
        if isinstance(part, StoredTensor):  # it has no bytes that could be read
            raise WeightsError(
                f"{kind} has a {type(part).__name__} as {key}: must be a plain tensor"
            )
