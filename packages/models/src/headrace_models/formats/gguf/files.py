"""The GGUF file that a path means. No torch."""

from __future__ import annotations

import re
from pathlib import Path

SUFFIX = ".gguf"


def gguf_file(path: Path) -> Path | None:
    """The file itself, or the one checkpoint of that format in a folder; of several parts the first.

    A folder with several checkpoints means none of them, and projectors of images
    (``mmproj-...``) are no checkpoint.
    """
    if path.is_file():
        return path if path.suffix.lower() == SUFFIX else None
    found = [
        file
        for file in sorted(path.glob(f"*{SUFFIX}"))
        if not file.name.startswith("mmproj") and _part(file) in (None, 1)
    ]
    return found[0] if len(found) == 1 else None


def _part(file: Path) -> int | None:
    found = re.search(r"-(\d{5})-of-\d{5}\.gguf$", file.name)
    return None if found is None else int(found[1])
