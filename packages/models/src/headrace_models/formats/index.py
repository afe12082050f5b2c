"""Which safetensors files make up a checkpoint. No torch."""

from __future__ import annotations

import json
from pathlib import Path

from headrace_core.errors import WeightsError
from headrace_models.formats.header import TensorEntry, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NOT_OURS = ("consolidated", "adapter_")
"""Beginnings of files that hold the same weights in another layout, or no whole model."""


def checkpoint_files(folder: Path) -> tuple[Path, ...]:
    """Files of the checkpoint in ``folder``, in order; empty if it holds no safetensors.

    Raises:
        WeightsError: the index is unreadable, or names a file that is missing or elsewhere.
    """
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,)
    if (folder / INDEX).is_file():
        return tuple(folder / name for name in sorted(set(read_index(folder).values())))
    return tuple(
        path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith(_NOT_OURS)
    )


def read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name.

    Raises:
        WeightsError: as :func:`checkpoint_files`.
    """
    path = folder / INDEX
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(names, dict):
            raise TypeError("weight_map is no object")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WeightsError(f"{path}: unreadable index: {type(error).__name__}: {error}") from error
    for tensor, name in names.items():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise WeightsError(f"{path}: tensor {tensor!r}: {name!r} is no plain file name")
        if not (folder / name).is_file():
            raise WeightsError(f"{path}: tensor {tensor!r}: file {name!r} is missing")
    return names


def checkpoint_headers(folder: Path) -> dict[Path, tuple[TensorEntry, ...]]:
    """Headers of all files, checked against the index if there is one.

    Raises:
        WeightsError: as above, or a tensor is not in the file that the index names.
    """
    files = checkpoint_files(folder)
    headers = {path: read_header(path) for path in files}
    if (len(files) == 1 and files[0].name == SINGLE) or not (folder / INDEX).is_file():
        return headers
    held = {path.name: {entry.name for entry in entries} for path, entries in headers.items()}
    for tensor, name in read_index(folder).items():
        if tensor not in held[name]:
            raise WeightsError(
                f"{folder / name}: tensor {tensor!r}, which {INDEX} places here, is missing"
            )
    return headers
