"""Opening what is a file of its own accord: a folder may hold pipes and sockets under a file's name."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from headrace_core.errors import UnsupportedModel, WeightsError

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
TEXTS = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".py")
"""Endings of a checkpoint's files."""
_KINDS: Mapping[str, Callable[[int], bool]] = {
    "directory": stat.S_ISDIR,
    "named pipe": stat.S_ISFIFO,
    "socket": stat.S_ISSOCK,
    "device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
}


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Raises:
        OSError: see :func:`check_regular`; or it cannot be opened.
    """
    check_regular(path)
    return open(path, "rb")


def check_regular(path: Path) -> None:
    """Refuse what is no regular file before anybody opens it: a pipe would have its reader wait for
    whoever writes.

    Raises:
        OSError: it is something else, or there is nothing.
    """
    kind = _kind(os.stat(path).st_mode)
    if kind is not None:
        raise OSError(f"it is a {kind}, must be a regular file")


def refuse_special_files(path: Path, *, weights: bool = True) -> None:
    """Refuse a folder in which something else has the name of a checkpoint's file: if the file need not be
    there, it would be passed over without a word.

    Args:
        path: a checkpoint's folder; a file is left to whoever reads it.
        weights: its weights will be read.

    Raises:
        WeightsError, UnsupportedModel: names the first, and says what it is.
    """
    kinds = (*TEXTS, *WEIGHTS) if weights else TEXTS
    for file in sorted(path.iterdir()) if path.is_dir() else ():
        ending = file.suffix.lower()
        try:
            kind = _kind(os.stat(file).st_mode) if ending in kinds else None
        except OSError:  # a link to nothing: whoever needs it says so
            continue
        if kind is not None and (kind != "directory" or ending != ".gguf"):  # of parts, on hubs
            error = WeightsError if ending in WEIGHTS else UnsupportedModel
            raise error(f"{file}: cannot be read: it is a {kind}, must be a regular file")


def _kind(mode: int) -> str | None:
    """What it is; None: a regular file."""
    if stat.S_ISREG(mode):
        return None
    return next((name for name, fits in _KINDS.items() if fits(mode)), "special file")
