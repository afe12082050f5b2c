"""Safetensors checkpoints, one file or sharded, or with some tensors cut for ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from headrace_core.config import LoadConfig
from headrace_core.model import LoadProgress, ProgressCallback, ignore_progress
from headrace_models.formats.content import Content
from headrace_models.formats.extra_config import extra_config
from headrace_models.formats.header import TensorEntry
from headrace_models.formats.index import checkpoint_files, checkpoint_headers
from headrace_models.formats.rank_parts import in_order, join_parts, split_headers

DTYPES = {
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
        extra_config(load, {})
        self.eager = load.safetensors_load_strategy == "eager"

    def recognises(self, path: Path) -> bool:
        return path.is_dir() and bool(checkpoint_files(path))

    def tensors(
        self, path: Path, progress: ProgressCallback = ignore_progress
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """Raises: WeightsError naming the file."""
        headers = checkpoint_headers(path)
        whole, parts = split_headers(headers)
        yield from read_tensors(whole, progress, eager=self.eager)
        for files in parts:
            callbacks = [progress, *(ignore_progress for _ in files[1:])]
            yield from join_parts(
                [
                    read_tensors({file: in_order(headers[file])}, callback, eager=self.eager)
                    for file, callback in zip(files, callbacks)
                ]
            )


def read_tensors(
    headers: Mapping[Path, tuple[TensorEntry, ...]],
    progress: ProgressCallback,
    *,
    eager: bool = False,
) -> Iterator[tuple[str, Tensor, Path]]:
    """The tensors of files whose headers have been checked.

    Raises:
        WeightsError: a file cannot be read any more.
    """
    total = sum(entry.num_bytes for entries in headers.values() for entry in entries)
    done = 0
    for file, entries in headers.items():
        content = Content(file, eager=eager)
        for entry in entries:
            flat = content.view(entry.name, DTYPES[entry.dtype], entry.offset, entry.num_bytes)
            yield entry.name, flat.view(entry.shape), file
            done += entry.num_bytes
            progress(LoadProgress("weights", done, total, "B", file.name))
            content.let_go(entry.offset, entry.num_bytes)
