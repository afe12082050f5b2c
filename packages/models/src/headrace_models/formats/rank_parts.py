"""Files that hold the parts of ranks: ``NAME-TP-000.safetensors`` and so on (Grok 2), ``model.0.pt``
(fairseq2).

A rank's file has the same names as the others', and a piece of each matrix: of its outputs, or of its
inputs where the results of ranks are summed. Pieces are put together while they are read, one matrix
at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from headrace_core.errors import WeightsError
from headrace_models.formats.header import TensorEntry

_PART = re.compile(r"(.+)-TP-(\d{3})\.safetensors")
_SUMMED = (".w2.weight", ".o_proj.weight", ".down_proj.weight", ".output_proj.weight")
"""Ends of names of matrices that are cut along their inputs."""

Headers = Mapping[Path, tuple[TensorEntry, ...]]
Tensors = Iterator[tuple[str, Tensor, Path]]


def is_part(file: Path) -> bool:
    """True if the file has pieces of matrices."""
    return _PART.fullmatch(file.name) is not None


def split_headers(headers: Headers) -> tuple[Headers, list[list[Path]]]:
    """Headers of whole files, and by name the files of all ranks.

    Raises:
        WeightsError: a rank's file is missing, or has other tensors than the first one's.
    """
    whole = {file: entries for file, entries in headers.items() if not _PART.fullmatch(file.name)}
    ranks: dict[str, dict[int, Path]] = {}
    for file in headers:
        if found := _PART.fullmatch(file.name):
            ranks.setdefault(found[1], {})[int(found[2])] = file
    parts = [[by_rank[rank] for rank in sorted(by_rank)] for _, by_rank in sorted(ranks.items())]
    for name, by_rank in ranks.items():
        if missing := set(range(max(by_rank) + 1)) - by_rank.keys():
            raise WeightsError(f"{name}-TP-{min(missing):03}.safetensors: file is missing")
    for files in parts:
        first = {entry.name for entry in headers[files[0]]}
        for file in files[1:]:
            if odd := first.symmetric_difference(entry.name for entry in headers[file]):
                raise WeightsError(f"{file}: tensor {min(odd)!r} is not in the files of all ranks")
    return whole, parts


def join_parts(streams: Sequence[Tensors]) -> Tensors:
    """Whole matrices of the ranks' pieces, which come in one order.

    Raises:
        WeightsError: pieces that do not fit together.
    """
    for pieces in zip(*streams, strict=True):
        name, _, file = pieces[0]
        yield name, join(name, [tensor for _, tensor, _ in pieces], file), file


def join(name: str, pieces: Sequence[Tensor], file: Path) -> Tensor:
    """One tensor of all ranks' pieces; of a vector, which is no matrix, each has the whole.

    Raises:
        WeightsError: pieces that do not fit together; ``file`` is the first rank's.
    """
    if len(pieces) == 1:
        return pieces[0]
    first, shapes = pieces[0], {tuple(piece.shape) for piece in pieces}
    if len(shapes) == 1 and first.dim() == 1 and all(torch.equal(first, x) for x in pieces[1:]):
        return first
    if len(shapes) > 1 or first.dim() != 2:
        raise WeightsError(
            f"{file}: tensor {name!r}: pieces of ranks have the shapes {sorted(shapes)}: must be "
            "matrices of one shape, or the same vector"
        )
    return torch.cat(list(pieces), dim=1 if name.endswith(_SUMMED) else 0)


def in_order(entries: Sequence[TensorEntry]) -> tuple[TensorEntry, ...]:
    """Entries sorted by name: ranks may have written them in orders of their own."""
    return tuple(sorted(entries, key=lambda entry: entry.name))
