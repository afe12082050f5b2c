"""Git-LFS pointers: what lies in a clone in place of large files until ``git lfs pull`` fetches them.
No torch.

Source: git-lfs/docs/spec.md, "The Pointer".
"""

from __future__ import annotations

from pathlib import Path

from headrace_core.errors import ModelError
from headrace_models.checkpoint.regular_file import TEXTS, WEIGHTS, open_regular

_FIRST_LINE = b"version https://git-lfs.github.com/spec/v1"
_MAX_BYTES = 1024
"""Largest size of a pointer, by its specification."""
_SHOWN = 3


def refuse_pointers(path: Path, *, weights: bool = True) -> None:
    """Refuse a checkpoint that was cloned without its large files.

    Args:
        path: the checkpoint's folder, or its GGUF file.
        weights: whether its weights will be read.

    Raises:
        ModelError: names the files, and how to fetch them.
    """
    kinds = (*TEXTS, *WEIGHTS) if weights else TEXTS
    files = [path] if path.is_file() else sorted(path.iterdir())
    found = [file.name for file in files if file.suffix.lower() in kinds and _is_pointer(file)]
    if not found:
        return
    folder = path.parent if path.is_file() else path
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise ModelError(
        f"{folder}: {', '.join(found[:_SHOWN])}{more}: Git-LFS pointers, not the files that they stand for. "
        f"Fetch these: git -C {folder} lfs pull (needs git-lfs: https://git-lfs.com)"
    )


def _is_pointer(file: Path) -> bool:
    try:
        if file.stat().st_size > _MAX_BYTES:
            return False
        with open_regular(file) as content:
            return content.read(len(_FIRST_LINE)) == _FIRST_LINE
    except OSError:  # whoever needs the file says so
        return False
