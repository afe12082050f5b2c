"""Safetensors checkpoints, one file or sharded."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from headrace_core.config import LoadConfig
from headrace_core.errors import WeightsError
from headrace_core.model import LoadProgress, ProgressCallback, ignore_progress
from headrace_models.formats.header import TensorEntry
from headrace_models.formats.index import checkpoint_files, checkpoint_headers

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class SafetensorsFormat:
    """See :class:`headrace_core.model.WeightFormat`.

    Args:
        load: ``safetensors_load_strategy`` decides between mapping files and reading them whole.
    """

    name = "safetensors"

    def __init__(self, load: LoadConfig) -> None:
        self.eager = load.safetensors_load_strategy == "eager"

    def recognises(self, path: Path) -> bool:
        return path.is_dir() and bool(checkpoint_files(path))

    def tensors(
        self, path: Path, progress: ProgressCallback = ignore_progress
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """Raises: WeightsError naming the file."""
        headers = checkpoint_headers(path)
        total = sum(entry.num_bytes for entries in headers.values() for entry in entries)
        done = 0
        for file, entries in headers.items():
            content = self._content(file)
            for entry in entries:
                yield entry.name, _view(content, entry, file), file
                done += entry.num_bytes
                progress(LoadProgress("weights", done, total, "B", file.name))
                _let_go(content, entry)

    def _content(self, file: Path) -> mmap.mmap | bytearray:
        """The file's bytes. A mapping lives as long as a tensor that looks into it."""
        try:
            if self.eager:
                return bytearray(file.read_bytes())
            with open(file, "rb") as handle:
                # Copy-on-write, because torch has no read-only tensors; nobody writes.
                return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise WeightsError(f"{file}: cannot be read: {error}") from error


def _let_go(content: mmap.mmap | bytearray, entry: TensorEntry) -> None:
    """Give a tensor's pages back to the file cache: what was packed need not count as ours. Whoever
    still looks gets them again."""
    if isinstance(content, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        first = -(-entry.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (entry.offset + entry.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            content.madvise(mmap.MADV_DONTNEED, first, last - first)


def _view(content: mmap.mmap | bytearray, entry: TensorEntry, file: Path) -> Tensor:
    if entry.offset + entry.num_bytes > len(content):
        raise WeightsError(f"{file}: tensor {entry.name!r} ends after the file (it has changed)")
    dtype = _DTYPES[entry.dtype]
    count = entry.num_bytes // dtype.itemsize
    flat = torch.frombuffer(content, dtype=dtype, count=count, offset=entry.offset)
    return flat.view(entry.shape)
