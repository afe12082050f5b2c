"""Safetensors checkpoints, one file or sharded, or with some tensors cut for ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
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
    "F8_E8M0": torch.float8_e8m0fnu,
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
        together = _Together(progress, num_bytes(headers))
        yield from read_tensors(whole, together.one(), eager=self.eager)
        for files in parts:
            yield from join_parts(
                [
                    read_tensors({file: in_order(headers[file])}, together.one(), eager=self.eager)
                    for file in files
                ]
            )


class _Together:
    """Tells the progress of several readers as that of one.

    Args:
        total: bytes of all of them.
    """

    def __init__(self, progress: ProgressCallback, total: int) -> None:
        self._progress, self._total = progress, total
        self._done: list[int] = []

    def one(self) -> ProgressCallback:
        """The callback of another reader."""
        own = len(self._done)
        self._done.append(0)

        def show(progress: LoadProgress) -> None:
            self._done[own] = progress.done
            self._progress(replace(progress, done=sum(self._done), total=self._total))

        return show


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
    total, done = num_bytes(headers), 0
    for file, entries in headers.items():
        content = Content(file, eager=eager)
        for entry in entries:
            flat = content.view(entry.name, DTYPES[entry.dtype], entry.offset, entry.num_bytes)
            yield entry.name, flat.view(entry.shape), file
            done += entry.num_bytes
            progress(LoadProgress("weights", done, total, "B", file.name))
            content.let_go(entry.offset, entry.num_bytes)


def num_bytes(headers: Mapping[Path, tuple[TensorEntry, ...]]) -> int:
    """Bytes of all tensors."""
    return sum(entry.num_bytes for entries in headers.values() for entry in entries)
