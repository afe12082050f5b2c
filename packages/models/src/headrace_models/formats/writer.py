"""Writing safetensors files tensor by tensor, without holding them all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from headrace_models.formats.safetensors import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SafetensorsWriter:
    """A file that has its name only once it is complete.

    The header stands before the tensors and is known after them: room is left for it, and what it does
    not need is filled with spaces, which the format allows.

    Args:
        room: bytes for the header.
        metadata: texts by name.
    """

    def __init__(self, path: Path, *, room: int, metadata: Mapping[str, str]) -> None:
        self.path = path
        self.num_bytes = 0
        """Bytes of the tensors so far."""
        self._room = -(-room // 8) * 8
        self._header: dict[str, Any] = {"__metadata__": dict(metadata)}
        self._partial = path.with_name(path.name + ".partial")
        self._file = open(self._partial, "wb")  # noqa: SIM115 - closed by __exit__
        self._file.seek(8 + self._room)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of any device and strides."""
        plain = tensor.detach().cpu().contiguous()
        end = self.num_bytes + plain.nbytes
        self._header[name] = {
            "dtype": _NAMES[plain.dtype],
            "shape": list(plain.shape),
            "data_offsets": [self.num_bytes, end],
        }
        # By storage: numpy has no bfloat16.
        raw = torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage())
        start = plain.storage_offset() * plain.element_size()
        self._file.write(raw[start : start + plain.nbytes].numpy().data)
        self.num_bytes = end

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)
            return
        text = json.dumps(self._header).encode().ljust(self._room)
        assert len(text) == self._room, "the room was reckoned from all names"
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + text)
        self._file.close()
        self._partial.replace(self.path)
