"""The files of a folder that make up a checkpoint. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from headrace_core.errors import WeightsError
from headrace_models.checkpoint.regular_file import check_regular
from headrace_models.formats.header import TensorEntry, read_header


@dataclass(frozen=True, slots=True)
class Naming:
    """Names of one format's files."""

    single: str
    """The one file of a small checkpoint."""
    index: str
    """Name of the file that maps tensors to files."""
    pattern: str
    """Files of a checkpoint without either."""
    others: tuple[str, ...]
    """Beginnings of files that hold the same weights in another layout, or no whole model."""


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = "model-rank-"
"""Beginning of files of a sharded state, which only ranks of the same number can read."""
SAFETENSORS = Naming(SINGLE, INDEX, "*.safetensors", ("consolidated", "adapter_", SHARD))
PICKLES = Naming(
    "pytorch_model.bin", "pytorch_model.bin.index.json", "*.bin",
    ("consolidated", "adapter_", "training_args", "optimizer", "scheduler", "rng_state", "scaler"),
)  # fmt: skip
CONSOLIDATED = Naming(
    "consolidated.safetensors",
    "consolidated.safetensors.index.json",
    "consolidated*.safetensors",
    (),
)
PT_FILES = replace(PICKLES, pattern="*.pt")


def checkpoint_files(folder: Path, naming: Naming = SAFETENSORS) -> tuple[Path, ...]:
    """Files of the checkpoint in ``folder``, in order; empty if it holds none so named.

    Raises:
        WeightsError: the index is unreadable, or names a file that is missing or elsewhere.
    """
    if (folder / naming.single).is_file():
        return (folder / naming.single,)
    if (folder / naming.index).is_file():
        return tuple(folder / name for name in sorted(set(read_index(folder, naming).values())))
    return tuple(
        path
        for path in sorted(folder.glob(naming.pattern))
        if not path.name.startswith(naming.others)
    )


def read_index(folder: Path, naming: Naming = SAFETENSORS) -> dict[str, str]:
    """Tensor name -> file name.

    Raises:
        WeightsError: as :func:`checkpoint_files`.
    """
    path = folder / naming.index
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(names, dict):
            raise TypeError("weight_map is not an object")
        if not names:
            raise ValueError("weight_map is empty")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WeightsError(f"{path}: unreadable index: {type(error).__name__}: {error}") from error
    for tensor, name in names.items():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise WeightsError(f"{path}: tensor {tensor!r}: {name!r} is not a plain file name")
        if not _is_file(folder / name):
            raise WeightsError(f"{path}: tensor {tensor!r}: file {name!r} is missing")
    return names


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for any file
        return False


def has_index(folder: Path, naming: Naming) -> bool:
    """True if the folder has the index that says which files there are."""
    return not (folder / naming.single).is_file() and (folder / naming.index).is_file()


def checkpoint_headers(
    folder: Path, naming: Naming = SAFETENSORS
) -> dict[Path, tuple[TensorEntry, ...]]:
    """Headers of all safetensors files, checked against the index if there is one.

    Raises:
        WeightsError: as above, or a tensor is not in the file that the index names.
    """
    headers = {path: read_header(path) for path in checkpoint_files(folder, naming)}
    if has_index(folder, naming):
        held = {path.name: {entry.name for entry in entries} for path, entries in headers.items()}
        for tensor, name in read_index(folder, naming).items():
            if tensor not in held[name]:
                raise missing_from(folder / name, tensor, naming.index)
    return headers


def file_bytes(path: Path) -> int:
    """Size of a file.

    Raises:
        WeightsError: it is a link to nowhere, no regular file, or cannot be looked at.
    """
    try:
        check_regular(path)
        return path.stat().st_size
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from error


def missing_from(file: Path, tensor: str, index: str) -> WeightsError:
    """A tensor is not where the index says."""
    return WeightsError(f"{file}: tensor {tensor!r}, which {index} places here, is missing")
